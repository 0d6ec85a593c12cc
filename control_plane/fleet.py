"""All groups of one control plane as one engine: what doors talk to, whichever groups live at the moment."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from control_plane.caller_share import CallerShare, Held
from control_plane.engine import Engine
from control_plane.engine_status import EngineLimits, FleetStatus, GroupView, RequestIds
from control_plane.generation import Cursor, Generation
from control_plane.generation_stream import GenerationStream
from control_plane.kv_event_log import KvEventLog, KvFollower
from control_plane.live_request import LiveRequest, check_right, resumed_stream
from control_plane.pause import PauseMode
from control_plane.rest import Rest
from control_plane.routing import choose_group
from control_plane.scheduling.request import Request
from service_chassis.callers import ADMIN, Caller
from service_chassis.errors import (
    DuplicateRequest,
    GroupLost,
    InvalidParameter,
    NotReady,
    PermissionDenied,
    UnknownRequest,
    WrongState,
)
from service_chassis.ids import RequestId

log = structlog.get_logger(__name__)

# States of a group, as in admin.proto.
FORMING, HELD, READY, DRAINING, ASLEEP, LOST = "forming", "held", "ready", "draining", "asleep", "lost"


@dataclass(slots=True)
class _Place:
    """One group: its engine, or why it has none."""

    engine: Engine | None = None
    state: str = FORMING  # while there is no engine
    reason: str = ""
    owner_address: str = ""  # where another control plane that has the group answers clients
    kv_events: KvEventLog = field(default_factory=KvEventLog)

    def present_state(self) -> str:
        """Return the state of the group as it is now."""
        if self.engine is None:
            return self.state
        reason = self.engine.not_ready_reason
        if not reason or reason == DRAINING:
            return reason or READY
        return ASLEEP if self.engine.is_at_rest else LOST


class Fleet:
    """Holds the present engines by the name of their group. A group that is formed anew brings a new one.

    Ready while one of them is. A control plane with one group needs no name for it.
    """

    def __init__(self, reason: str = "the model is being loaded") -> None:
        """Begin empty; ``reason`` is what clients are told."""
        self.now: Callable[[], float] = time.monotonic  # the clock of deadlines
        self._started_at = self.now()
        self.ids = RequestIds()  # of all engines, those of before too
        self._places = {"0": _Place(reason=reason)}
        self.share: CallerShare | None = None  # of each caller, where callers are told from each other
        self._entering: Counter[str] = Counter()  # requests of each caller that are being admitted
        self.num_refused: Counter[str] = Counter()  # requests that were not let in, by the error's reason
        self._closed_reason = ""  # said to every engine, those to come too
        self.closed = asyncio.Event()  # set as soon as there is one
        self._pause: PauseMode | None = None  # likewise
        self.num_pauses = 0  # ever
        self.rest = Rest(self)
        self._past_queries = self._past_hits = 0  # prefix cache lookups of engines that are gone
        self._listeners: list[Callable[[bool], None]] = []

    # What keepers of groups say

    def expect(self, names: Iterable[str]) -> None:
        """Name the groups that are going to be."""
        reason = self._places["0"].reason
        self._places = {name: _Place(reason=reason) for name in names}

    def take(self, engine: Engine, name: str = "0") -> None:
        """Seat the engine of a group; readiness is its own from now on."""
        place = self._places.setdefault(name, _Place())
        place.engine, place.owner_address = engine, ""
        place.kv_events.belong_to(engine)
        for other in self._engines():
            if other is not engine:
                engine.leave_to(other)
        engine.hand_over = lambda live, request: self._hand_over(engine, live, request)
        if self._closed_reason:
            engine.close(self._closed_reason)
        if self._pause is not None:
            engine.pause(self._pause)
        self.rest.take(engine)
        engine.on_readiness(lambda _: self._tell(engine))

    def leave(self, reason: str, name: str = "0", *, state: str = FORMING) -> None:
        """Say that a group has no engine any more, and why."""
        place = self._places.setdefault(name, _Place())
        if place.engine is not None:
            status = place.engine.status()
            self._past_queries += status.prefix_cache_queries
            self._past_hits += status.prefix_cache_hits
        place.engine, place.state, place.reason = None, state, reason
        place.kv_events.belong_to(None)
        self._tell(None)

    def report(self, reason: str, name: str = "0") -> None:
        """Say what is being waited for while a group has no engine."""
        place = self._places.setdefault(name, _Place())
        was_held = bool(place.owner_address)
        place.state, place.reason, place.owner_address = FORMING, reason, ""
        if was_held:
            self._tell(None)

    def hold(self, reason: str, name: str, owner_address: str) -> None:
        """Say that another control plane has a group."""
        place = self._places.setdefault(name, _Place())
        place.state, place.reason, place.owner_address = HELD, reason, owner_address
        self._tell(None)

    # What doors ask

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted and computed."""
        return any(engine.ready for engine in self._engines())

    @property
    def relay_address(self) -> str:
        """Where a control plane answers that has a group, while none here is ready; empty where there is none."""
        if self.ready or self._closed_reason or self._pause is not None:
            return ""
        return self._owner_address()

    @property
    def is_serving(self) -> bool:
        """Whether a new request is served: by a group of ours, or through its owner."""
        return self.ready or bool(self.relay_address)

    def has_settled(self) -> bool:
        """Whether some group is ours, and every other one is too, or belongs to another control plane."""
        states = {place.present_state() for place in self._places.values()}
        return bool(states & {READY, ASLEEP}) and states <= {READY, ASLEEP, HELD}

    @property
    def not_ready_reason(self) -> str:
        """Why not, or nothing."""
        if self.ready:
            return ""
        reasons = {name: place.engine.not_ready_reason if place.engine else place.reason for name, place in self._all()}
        if len(set(reasons.values())) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"group {name}: {reason}" for name, reason in reasons.items())

    def on_readiness(self, callback: Callable[[bool], None]) -> None:
        """Call back with ``ready`` now and whenever it may have changed."""
        self._listeners.append(callback)
        callback(self.ready)

    @property
    def limits(self) -> EngineLimits:
        """What every group can take. Raises ``NotReady`` where there is none."""
        every = (engine.limits for engine in self._some_engines())
        return min(every, key=lambda limits: (limits.max_model_len, limits.num_blocks))

    async def generate(self, generation: Generation) -> GenerationStream:
        """Admit a request to the group that suits it best. Raises as ``Engine.generate`` does."""
        places = list(self._places.values())
        if generation.group is not None:
            if not 0 <= generation.group < len(places):
                rule = f"must be from 0 to {len(places) - 1}, since there are {len(places)} groups"
                raise InvalidParameter("data_parallel_rank", generation.group, rule if len(places) > 1 else "must be 0")
            places = [places[generation.group]]
        ready = [place.engine for place in places if place.engine is not None and place.engine.admits]
        if not ready:
            raise self._not_ready()
        request_id = generation.request_id
        if len(self._places) > 1 and any(engine.knows(request_id) for engine in self._engines()):
            raise DuplicateRequest(f"request_id={request_id!r}: is running")
        engine = ready[0]
        if len(ready) > 1:
            tokens = generation.prompt_token_ids if generation.reads_prefix_cache else ()
            candidates = [one.candidate(tokens, generation.cache_namespace) for one in ready]
            choice = choose_group(candidates)
            engine = ready[choice.chosen]
            log.debug("request.routed", request_id=request_id, group=self._name_of(engine), reason=choice.reason)
        # A grammar may have to be compiled first: whoever sends many at once has them all in the meantime.
        self._entering[generation.client_identity] += 1
        try:
            return await engine.generate(generation)
        finally:
            self._entering[generation.client_identity] -= 1
            if not self._entering[generation.client_identity]:
                del self._entering[generation.client_identity]

    async def resume(
        self, request_id: RequestId, token: bytes, identity: str, cursors: Sequence[Cursor]
    ) -> GenerationStream:
        """Return another stream of a request, after the cursors. The one before it ends, and its cancel means nothing.

        Raises:
            PermissionDenied: this caller has no right to it.
            InvalidParameter, ResumeLost: the cursors do not fit.
            UnknownRequest: proven: for every group a rank said just now that it is ours, and none knows the request.
            GroupLost: proven as well, and it was here when its group was lost.
            NotReady: not known here, and not proven; another control plane may know.
        """
        for engine in self._engines():
            if engine.knows(request_id):
                return engine.resume(request_id, token, identity, cursors)
        ended = self.ids.record(request_id, self.now())
        if ended is not None:
            return resumed_stream(ended, token, identity, cursors)
        engines = self._engines()
        proofs = await asyncio.gather(*(engine.proves_ownership() for engine in engines))
        if any(engine.knows(request_id) for engine in self._engines()):  # meanwhile
            return await self.resume(request_id, token, identity, cursors)
        if len(engines) == len(self._places) and all(proofs):
            if (left := self.ids.in_doubt(request_id, self.now())) is not None:
                check_right(left, token, identity)
                raise GroupLost("the group was lost, and no rank knows the request any more")
            raise UnknownRequest(f"request_id={request_id!r}: is not running and did not end lately")
        raise self._not_ready()

    def abort(self, request_id: RequestId, *, by: Caller | None = None) -> bool:
        """End a request wherever it is; its id is free at once. False: it was not running.

        Raises:
            PermissionDenied: it is not of the caller who wants this, and he is no administrator. None is the server.
        """
        if by is not None and not by.may(ADMIN) and self._client_of(request_id) not in (None, by.identity):
            raise PermissionDenied(f"request_id={request_id!r}: is another caller's")
        self.ids.free(request_id)
        return any(engine.abort(request_id) for engine in self._engines())

    def _client_of(self, request_id: RequestId) -> str | None:
        """Return whose request it is, or was lately; None where nobody knows."""
        for engine in self._engines():
            if (client := engine.client_of(request_id)) is not None:
                return client
        ended = self.ids.record(request_id, self.now())
        return None if ended is None else ended.generation.client_identity

    def check_share(self, caller: Caller) -> None:
        """Raise ``QueueFull`` where a caller has so much that another request is too many."""
        if self.share is not None and caller.identity:
            num_entering = self._entering[caller.identity]
            held = Held(num_entering, num_entering)
            self.share.check(caller, sum((engine.held_by(caller.identity) for engine in self._engines()), held))

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no row holds, in all groups; return the number of blocks."""
        return sum(engine.reset_prefix_cache() for engine in self._some_engines())

    def follow_kv_events(self) -> KvFollower:
        """Return somebody who can follow what the groups have cached. Raises ``NotReady`` where there is none."""
        self._some_engines()
        return KvFollower(place.kv_events for place in self._places.values())

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is here; False: some still were after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle()
        except TimeoutError:
            pass
        return all(engine.is_idle for engine in self._engines())

    async def _idle(self) -> None:
        # A request may move from one to another meanwhile.
        while busy := [engine for engine in self._engines() if not engine.is_idle]:
            await busy[0].wait_idle()

    @property
    def pause_mode(self) -> PauseMode | None:
        """What holds for requests; None: nothing is paused."""
        return self._pause

    def hold_still(self, mode: PauseMode) -> None:
        """Plan no more steps in any group, those to come too, and do nothing else."""
        self._pause = mode
        self.num_pauses += 1
        for engine in self._engines():
            engine.pause(mode)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stop scheduling in every group, those to come too, and return when nothing is computed any more.

        It holds from the moment of the call, and goes on when the caller does not wait for it to take effect.

        Raises:
            WrongState: generation was resumed before the pause took effect.
        """
        self.hold_still(mode)
        if mode is PauseMode.ABORT:
            self.abort_all()
        await self.stand_still()
        if clear_cache:
            for engine in self._engines():
                engine.reset_prefix_cache()
            await self.stand_still()

    def unpause(self) -> None:
        """Schedule again, in every group."""
        self._pause = None
        for engine in self._engines():
            engine.unpause()

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force and has taken effect."""
        return self._pause is not None and all(engine.is_still for engine in self._engines())

    async def stand_still(self) -> None:
        """Return when a pause has taken effect. Raises ``WrongState`` if it ended before."""
        # A request may move from one to another meanwhile.
        while self._pause is not None and (busy := [one for one in self._engines() if not one.is_still]):
            await busy[0].stand_still()
        if self._pause is None:
            raise WrongState("generation was resumed before the pause had taken effect")

    def status(self) -> FleetStatus:
        """Say what all groups are doing."""
        groups = tuple(self._view(name, place) for name, place in self._all())
        engines = [group.engine for group in groups if group.engine is not None]
        return FleetStatus(
            groups=groups,
            uptime_s=self.now() - self._started_at,
            num_running=sum(status.num_running for status in engines),
            num_waiting=sum(status.num_waiting for status in engines),
            prompt_tokens_per_s=sum(status.prompt_tokens_per_s for status in engines),
            output_tokens_per_s=sum(status.output_tokens_per_s for status in engines),
            steps_per_s=sum(status.steps_per_s for status in engines),
            prefix_cache_queries=self._past_queries + sum(status.prefix_cache_queries for status in engines),
            prefix_cache_hits=self._past_hits + sum(status.prefix_cache_hits for status in engines),
            num_finished=max([self.ids.num_finished, *(status.num_finished for status in engines)]),
        )

    # What the server asks

    async def drain(self, timeout_s: float | None) -> int:
        """Accept no more requests and wait until none is left; after ``timeout_s`` abort the rest.

        Returns:
            How many were aborted.
        """
        self.close(DRAINING)
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle()
            return 0
        except TimeoutError:
            return self.abort_all()

    def close(self, reason: str) -> None:
        """Accept no more requests; those admitted go on."""
        self._closed_reason = self._closed_reason or reason
        self.closed.set()
        for engine in self._engines():
            engine.close(reason)

    def abort_all(self) -> int:
        """End every request with reason abort; return how many there were."""
        return sum(engine.abort_all() for engine in self._engines())

    # Inside

    def _all(self) -> list[tuple[str, _Place]]:
        return list(self._places.items())

    def engines(self) -> dict[str, Engine]:
        """Return the engines that there are, by the names of their groups."""
        return {name: place.engine for name, place in self._all() if place.engine is not None}

    def groups_to_come(self) -> dict[str, str]:
        """Return the names of groups that are ours to form and have no engine, each with the reason."""
        return {name: place.reason for name, place in self._all() if place.engine is None and place.state != HELD}

    def _engines(self) -> list[Engine]:
        return [place.engine for place in self._places.values() if place.engine is not None]

    def _some_engines(self) -> list[Engine]:
        engines = self._engines()
        if not engines:
            raise self._not_ready()
        return engines

    def _not_ready(self) -> NotReady:
        """Return the refusal of a request that provably did not start, with where else to go, if that is known."""
        where = self._owner_address()
        metadata = {"owner_address": where} if where else {}
        return NotReady(f"not accepting requests: {self.not_ready_reason}", metadata=metadata)

    def _owner_address(self) -> str:
        return next((place.owner_address for place in self._places.values() if place.owner_address), "")

    def _name_of(self, engine: Engine) -> str:
        return next((name for name, place in self._all() if place.engine is engine), "")

    def _view(self, name: str, place: _Place) -> GroupView:
        engine = place.engine
        if engine is None:
            return GroupView(name=name, state=place.state, reason=place.reason, engine=None, limits=None)
        state, reason = place.present_state(), engine.not_ready_reason
        return GroupView(name=name, state=state, reason=reason, engine=engine.status(), limits=engine.limits)

    def _hand_over(self, lost: Engine, live: LiveRequest, request: Request) -> bool:
        """Give a request of a lost group to the one that suits it best, if one can take it."""
        others = [engine for engine in self._engines() if engine is not lost]
        tokens = () if request.skip_reading_prefix_cache else request.longest_known()
        while others:
            candidates = [one.candidate(tokens, request.cache_namespace) for one in others]
            engine = others.pop(choose_group(candidates).chosen)
            if engine.take_over(live, request):
                log.info(
                    "request.moved",
                    request_id=request.request_id,
                    from_group=self._name_of(lost),
                    to_group=self._name_of(engine),
                    num_known_tokens=request.num_known_tokens(),
                )
                return True
        return False

    def _tell(self, engine: Engine | None) -> None:
        if engine is not None and engine not in self._engines():
            return  # an engine of before
        for callback in self._listeners:
            callback(self.ready)
