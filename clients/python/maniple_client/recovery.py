"""Decide what to do about a stream that broke: go on elsewhere, wait, or tell the caller. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from maniple_client.errors import Aborted, Cancelled, ManipleError, NotFound, TransportLost, Unavailable

# A control plane that takes over needs about a second after the lease of the dead one lapsed (3 s); a spare answers at
# once where to go. Adopted requests wait 30 s for their clients.
RESUME_FOR_S = 30.0
_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 1.0
# gRPC's own words where it had no connection to send a call on.
_NEVER_SENT = "failed to connect to all addresses"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Try again after ``delay_s``: at ``address`` where that is known, else at the next one in turn."""

    delay_s: float
    address: str = ""
    starts_over: bool = False  # send the request anew


class Recovery:
    """The attempts of one stream. A success starts the count anew."""

    def __init__(self, *, give_up_after_s: float = RESUME_FOR_S, num_addresses: int = 1) -> None:
        self._give_up_after_s = give_up_after_s
        self._num_addresses = num_addresses
        self._broken_since: float | None = None
        self._delay_s = _FIRST_DELAY_S

    def heard(self) -> None:
        """The stream brought something: whatever broke before is over."""
        self._broken_since = None
        self._delay_s = _FIRST_DELAY_S

    def after(
        self,
        error: ManipleError,
        now: float,
        *,
        has_started: bool,
        has_output: bool = False,
        can_resume: bool = True,
        may_repeat: bool = False,
    ) -> Attempt | None:
        """Say what follows an error; None: it is the caller's.

        Args:
            error: with which a call of Generate or Resume ended.
            now: in seconds.
            has_started: the request was in a batch. Before that it may only be sent again where it provably did not
                run; afterwards only if nobody knows of it any more.
            has_output: something of its output has come.
            can_resume: the server gave the right to resume it: it, or another one, may still have it.
            may_repeat: it does no harm to run it twice, so that it may be sent again whatever became of it.
        """
        if may_repeat:
            is_worth_it = isinstance(error, TransportLost | Unavailable | Aborted)
        else:
            is_worth_it = can_resume and self._may_resume(error) if has_started else self._may_send_again(error)
        # Its owner was killed after it had said that the request began, and before any rank had heard of it.
        starts_over = has_started and can_resume and not has_output and _is_unknown(error)
        if not (is_worth_it or starts_over):
            return None
        if self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since >= self._give_up_after_s:
            return None
        address = error.metadata.get("owner_address", "")
        delay_s = self._delay_s
        self._delay_s = min(2 * self._delay_s, _LAST_DELAY_S)
        return Attempt(delay_s, address, starts_over)

    @staticmethod
    def _may_resume(error: ManipleError) -> bool:
        if isinstance(error, Aborted):
            return error.reason == "TAKEN_OVER"
        return isinstance(error, TransportLost | Unavailable) or _was_dropped(error)

    def _may_send_again(self, error: ManipleError) -> bool:
        if "owner_address" in error.metadata:
            return error.may_retry
        if self._num_addresses == 1:
            return False
        if isinstance(error, TransportLost):
            return _NEVER_SENT in error.message
        return isinstance(error, Unavailable) or _was_dropped(error)


def _is_unknown(error: ManipleError) -> bool:
    return isinstance(error, NotFound) and error.reason == "UNKNOWN_REQUEST"


def _was_dropped(error: ManipleError) -> bool:
    """Whether the other side gave up on the call: a server that stops does so with calls that it never looked at.

    What may have begun of it ended with the call, so that sending it again does not run it a second time beside it.
    """
    return isinstance(error, Cancelled) and not error.reason
