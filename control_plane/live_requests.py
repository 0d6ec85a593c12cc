"""The requests of one engine: who is here, whom nobody reads at the moment, and how each of them ends."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator

import structlog

from control_plane.caller_share import Held
from control_plane.engine_status import RequestIds
from control_plane.live_request import LiveRequest
from service_chassis.errors import ManipleError, TakenOver
from service_chassis.ids import RequestId
from service_chassis.telemetry import trace_id_of

log = structlog.get_logger(__name__)


class LiveRequests:
    """Owned by the engine's loop. Every request that enters leaves by ``end`` or ``give_away``, once."""

    def __init__(self, ids: RequestIds) -> None:
        """Begin empty; ``ids`` remembers who ended."""
        self._here: dict[RequestId, LiveRequest] = {}
        self._of_caller: dict[str, dict[RequestId, LiveRequest]] = {}  # by identity; of callers who have one
        self._ids = ids
        self._detached: list[tuple[float, RequestId]] = []  # a heap: when a request without a stream is given up
        self._idle = asyncio.Event()
        self._idle.set()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._here

    def __iter__(self) -> Iterator[LiveRequest]:
        """Over a copy: a request may end while others are looked at."""
        return iter(list(self._here.values()))

    def get(self, request_id: RequestId) -> LiveRequest | None:
        """Return a request, if it is here."""
        return self._here.get(request_id)

    def held_by(self, identity: str) -> Held:
        """Say how many requests one caller has here. O(those)."""
        own = self._of_caller.get(identity, {}).values()
        return Held(len(own), sum(live.started_at is None for live in own))

    @property
    def is_idle(self) -> bool:
        """Whether nobody is here."""
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        """Wait until nobody is here."""
        await self._idle.wait()

    def enter(self, live: LiveRequest) -> None:
        """Let a request in, new or from elsewhere, read by somebody or not."""
        self._here[live.generation.request_id] = live
        if identity := live.generation.client_identity:
            self._of_caller.setdefault(identity, {})[live.generation.request_id] = live
        self._idle.clear()
        if live.stream is None and live.detached_until is not None:
            heapq.heappush(self._detached, (live.detached_until, live.generation.request_id))

    def give_away(self, live: LiveRequest) -> None:
        """Let a request go that goes on elsewhere."""
        del self._here[live.generation.request_id]
        if (own := self._of_caller.get(live.generation.client_identity)) is not None:
            del own[live.generation.request_id]
            if not own:
                del self._of_caller[live.generation.client_identity]
        if not self._here:
            self._idle.set()

    def detach(self, live: LiveRequest, until: float) -> None:
        """Let a request go on without a stream, until another one comes or the time is over."""
        live.detach(until)
        heapq.heappush(self._detached, (until, live.generation.request_id))

    @property
    def given_up_at(self) -> float | None:
        """When ``given_up`` may have something to return next."""
        return self._detached[0][0] if self._detached else None

    def given_up(self, now: float) -> list[RequestId]:
        """Return the requests for which no stream came in time, each once: whoever calls ends them. O(returned)."""
        found = []
        while self._detached and self._detached[0][0] <= now:
            until, request_id = heapq.heappop(self._detached)
            live = self._here.get(request_id)
            if live is not None and live.detached_until == until:
                found.append(request_id)
        return found

    def end(self, live: LiveRequest, error: ManipleError | None, now: float, *, frees_id: bool = False) -> None:
        """Put the one last event, and write the request's one line."""
        self.give_away(live)
        generation = live.generation
        # What a new owner holds is asked of it, and what never started its client cannot ask for.
        is_told_here = live.started_at is not None and not isinstance(error, TakenOver)
        tell = (lambda: live) if is_told_here else None
        self._ids.add_finished(generation.request_id, now, is_free=frees_id, tell=tell)
        if error is None:
            live.close(now)
        else:
            live.fail(error)
        reasons = sorted({sample.reason.value for sample in live.samples if sample.reason})
        log.info(
            "request.finished",
            request_id=generation.request_id,
            reason=type(error).__name__ if error else "+".join(reasons),
            num_prompt_tokens=len(generation.prompt_token_ids),
            num_cached_tokens=live.num_cached_tokens,
            num_output_tokens=live.num_output_tokens,
            queued_s=round((live.started_at or now) - live.arrived_at, 4),
            ttft_s=None if (ttft_s := live.time_to_first_token_s) is None else round(ttft_s, 4),
            duration_s=round(now - live.arrived_at, 4),
            **({"trace_id": trace_id} if (trace_id := trace_id_of(generation.traceparent)) else {}),
        )
