"""What a program does about errors that its client leaves to it: send a request again, or start over.

The client resumes by itself. Whether a request may run a second time is for the program to decide; these do.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

from maniple_client import Aborted, AlreadyExists, DataLoss, ManipleError, NotFound, TransportLost

_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 1.0


@dataclass(frozen=True)
class Again:
    """Try once more, after so many seconds."""

    what: str  # "sending_again": it did not begin; "starting_over": what had begun is gone
    delay_s: float
    request_id: str


class Attempts:
    """Counts the attempts at one generation. Pure: time is an argument."""

    def __init__(self, *, request_id: str, retry_for_s: float, starts_over: int) -> None:
        # An id of ours, so that sending it again cannot run it twice: a server admits an id once.
        self.request_id = request_id or uuid.uuid4().hex
        self._retry_for_s = retry_for_s
        self._starts_over_left = starts_over
        self._sent_before = False
        self._delay_s = _FIRST_DELAY_S
        self._broken_since: float | None = None

    def heard(self) -> None:
        """The stream brought something: whatever broke before is over."""
        self._broken_since, self._delay_s = None, _FIRST_DELAY_S

    def after(self, error: ManipleError, now: float, *, begun: bool) -> Again | None:
        """Say what follows an error; None: it is the user's. ``begun``: the server said that it started."""
        what = self._what(error, begun)
        if what == "starting_over":
            if self._starts_over_left == 0:
                return None
            self._starts_over_left -= 1
            self.request_id = uuid.uuid4().hex  # the old id is taken for a minute
        if self._broken_since is None:
            self._broken_since = now
        if not what or now - self._broken_since >= self._retry_for_s:
            return None
        self._sent_before = what == "sending_again"
        delay_s = max(self._delay_s, error.retry_after_s or 0.0)
        self._delay_s = min(2 * self._delay_s, _LAST_DELAY_S)
        # Up to a fifth more, so that clients that broke together do not come back together.
        return Again(what, delay_s * random.uniform(1.0, 1.2), self.request_id)

    def _what(self, error: ManipleError, begun: bool) -> str:
        lost = isinstance(error, Aborted) and error.reason == "GROUP_LOST"
        if begun:
            gone = isinstance(error, DataLoss) or (isinstance(error, NotFound) and error.reason == "UNKNOWN_REQUEST")
            return "starting_over" if lost or gone else ""
        if error.may_retry or isinstance(error, TransportLost):
            return "sending_again"
        taken = isinstance(error, Aborted) and error.reason == "TAKEN_OVER"
        ended_with_its_connection = isinstance(error, AlreadyExists) and self._sent_before
        return "starting_over" if lost or taken or ended_with_its_connection else ""
