"""Read on at the next owner of a group, for clients that cannot resume by themselves (PROTOCOL E).

After its goodbye the old control plane is a client like any other: it asks the new one to resume, from what its own
client was told last, and passes on what comes. So a gateway notices a pause and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from google.rpc import code_pb2

from control_plane.control_blob import ResumeRight
from control_plane.generation import Chunk, Cursor, Done, Event, PromptLogprobs, SampleFinished
from control_plane.live_request import LiveRequest
from service_chassis.errors import GroupLost, ManipleError, ResumeLost, TakenOver, UnknownRequest
from service_chassis.ids import RequestId
from service_chassis.telemetry import get_logger

log = get_logger()

# A spare looks at the group every 0.1 s and needs about as long to take it over.
_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverSettings:
    """Seconds; see config."""

    step_timeout_s: float  # for the steps under way
    resume_grace_s: float  # how long a request may be nowhere
    drain_timeout_s: float  # for reading on; what is not done then is aborted


class ResumeAt(Protocol):
    """How another control plane is asked to go on with a request."""

    def __call__(
        self, address: str, request_id: RequestId, right: ResumeRight, cursors: Sequence[Cursor]
    ) -> AsyncGenerator[Event, None]:
        """Yield the events behind the cursors, in the name of whoever has the right to them.

        Raises:
            ManipleError: as the other one told it.
            ConnectionError, TimeoutError: it is gone, or was never there.
        """


class NextOwner:
    """Whoever has the group after us."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[str]],
        resume_at: ResumeAt,
        settings: HandoverSettings,
        *,
        on_found: Callable[[str], None] = lambda address: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what is needed.

        Args:
            ask: asks the workers where their owner answers clients; nothing while they have none.
            resume_at: speaks to it.
            settings: how long everything may take.
            on_found: told the address whenever it was found.
            clock: monotonic seconds.
        """
        self._ask = ask
        self._resume_at = resume_at
        self.settings = settings
        self._on_found = on_found
        self._clock = clock
        self._known = ""
        self._asking = asyncio.Lock()  # one asks for all requests

    async def address(self, *, within_s: float) -> str:
        """Return where the next owner answers; nothing if there is none in time."""
        give_up_at = self._clock() + within_s
        async with self._asking:
            while not self._known:
                self._known = await self._ask()
                if self._known:
                    self._on_found(self._known)
                elif self._clock() >= give_up_at:
                    break
                else:
                    await asyncio.sleep(_FIRST_DELAY_S)
            return self._known

    def _failed_at(self, address: str) -> None:
        """Ask again: it does not have the group any more, or is gone."""
        if self._known == address:
            self._known = ""

    async def read_on(self, live: LiveRequest) -> ManipleError | None:
        """Tell the client of a request what comes of it elsewhere, up to its end; return the error that it ended with.

        The owner may change again meanwhile, or die: the request is looked for where it is then.
        """
        request_id = live.generation.request_id
        address, heard_at, delay_s = "", self._clock(), _FIRST_DELAY_S
        why = "no other control plane has the group"
        while (left_s := heard_at + self.settings.resume_grace_s - self._clock()) > 0:
            address = address or await self.address(within_s=left_s)
            if not address:
                break
            try:
                stream = self._resume_at(address, request_id, live.right, live.told())
                async with aclosing(stream) as events:
                    async for event in events:
                        heard_at, delay_s = self._clock(), _FIRST_DELAY_S
                        if isinstance(event, Done):
                            return None
                        if isinstance(event, PromptLogprobs | Chunk | SampleFinished):
                            live.tell(event)
                why, elsewhere = f"{address} ended the stream half-way", ""
            except (ConnectionError, TimeoutError) as error:
                why, elsewhere = f"{address}: {error}", ""
            except (UnknownRequest, ResumeLost) as error:
                # To this client both mean that its tokens are gone: it holds no cursor that it could be told of.
                return GroupLost(f"the group was lost after it was handed over: {error.message}")
            except ManipleError as error:
                if error.code != code_pb2.UNAVAILABLE and not isinstance(error, TakenOver):
                    return error
                why, elsewhere = f"{address}: {error.message}", error.metadata.get("owner_address", "")
            self._failed_at(address)
            address = elsewhere
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)
        log.warning("request.not_handed_over", request_id=request_id, reason=why)
        return TakenOver(f"the group was handed over, and nobody went on for {self.settings.resume_grace_s:g} s: {why}")
