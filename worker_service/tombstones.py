"""Remember rows that left, for an owner that comes later: their tokens, and why they ended (PROTOCOL B9).

Pure; used by the event loop alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from maniple.v1 import worker_pb2
from service_chassis.protocol.logprobs import Logprobs

# As it will be told, less its age. Made when a row leaves: with a thousand of them a takeover would wait for that.
Tombstone = worker_pb2.SnapshotResponse.Tombstone

# Log-probabilities may take far more than tokens. Beyond this the oldest lose theirs: whoever asks again for a request
# that ended long ago gets its tokens without them.
MAX_LOGPROBS_BYTES = 64 << 20


@dataclass(slots=True)
class _Grave:
    at: float  # on our clock
    tombstone: Tombstone
    output: Logprobs | None
    prompt: Logprobs | None

    @property
    def logprobs_bytes(self) -> int:
        return sum(one.num_bytes for one in (self.output, self.prompt) if one is not None)


class Tombstones:
    """The last ``max_kept`` rows that left, each for ``keep_s`` while somebody owns the rank.

    Their clock stands still between two owners: whoever lost its stream with the first can only ask the second.
    """

    def __init__(
        self, *, keep_s: float = 60.0, max_kept: int = 1024, max_logprobs_bytes: int = MAX_LOGPROBS_BYTES
    ) -> None:
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._max_logprobs_bytes = max_logprobs_bytes
        self._kept: deque[_Grave] = deque()  # oldest first
        self._logprobs_bytes = 0  # of all of them
        self._stood_still_s = 0.0
        self._last_expired: float | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def add(
        self, now: float, tombstone: Tombstone, output: Logprobs | None = None, prompt: Logprobs | None = None
    ) -> None:
        """Bury a row, with the log-probabilities of its output and prompt. The oldest goes where there are too many."""
        if len(self._kept) == self._max_kept:
            self._forget_oldest()
        grave = _Grave(now - self._stood_still_s, tombstone, output, prompt)
        self._kept.append(grave)
        self._logprobs_bytes += grave.logprobs_bytes
        for oldest in self._kept if self._logprobs_bytes > self._max_logprobs_bytes else ():
            self._logprobs_bytes -= oldest.logprobs_bytes
            oldest.output = oldest.prompt = None
            if self._logprobs_bytes <= self._max_logprobs_bytes:
                break

    def _forget_oldest(self) -> None:
        self._logprobs_bytes -= self._kept.popleft().logprobs_bytes

    def expire(self, now: float, *, orphaned: bool = False) -> None:
        """Forget rows that left more than ``keep_s`` ago. To be called often.

        Args:
            now: monotonic.
            orphaned: nobody owned the rank since the call before, so that time does not count.
        """
        if orphaned and self._last_expired is not None:
            self._stood_still_s += now - self._last_expired
        self._last_expired = now
        while self._kept and now - self._stood_still_s - self._kept[0].at > self._keep_s:
            self._forget_oldest()

    def all(self, now: float) -> list[tuple[Tombstone, float]]:
        """Return what is kept with its age in seconds, oldest first."""
        return [(grave.tombstone, max(0.0, now - self._stood_still_s - grave.at)) for grave in self._kept]

    def logprobs(self) -> list[tuple[Logprobs | None, Logprobs | None]]:
        """Return what is kept of the output and the prompt of each, in the order of ``all``; not to be changed."""
        return [(grave.output, grave.prompt) for grave in self._kept]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._logprobs_bytes = 0
