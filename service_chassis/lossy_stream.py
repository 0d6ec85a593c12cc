"""Write lines for somebody who may stop reading them: what finds no room is dropped and counted, and nobody waits.

A pipe has room for some lines. Once it is full a plain write waits for its reader: a server would stand still, its
event loop with it, because of whoever collects its log.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Protocol

_ROOM = 4096  # bytes that a pipe or socket takes without waiting, where it is said to be writable: PIPE_BUF


def plain_notice(num_lines: int) -> str:
    """Say to people that lines were dropped."""
    return f"({num_lines} lines were dropped here: nobody read them)"


class Writable(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class LossyStream:
    """A text stream of whole lines over another one. Calls come from one thread at a time."""

    def __init__(self, stream: Writable, notice: Callable[[int], str]) -> None:
        """Write to ``stream``; ``notice`` is the line that says how many were dropped, once there is room again."""
        self._stream = stream
        self._notice = notice
        self._num_dropped = 0
        self._is_cut = False  # the last line that was written lacks its end

    def write(self, line: str, wait_s: float = 0.0) -> int:
        """Write a line with its end, or drop it; what must not be lost to a slow reader may wait for some moments."""
        if self._num_dropped and self._has_room(wait_s):
            missing = "\n" if self._is_cut else ""
            said = f"{missing}{self._notice(self._num_dropped)}\n"
            self._num_dropped, self._is_cut = 0, False
            self._put(said)
        if not self._put(line, wait_s):
            self._num_dropped += 1
        return len(line)

    def flush(self) -> None:
        """Do nothing: what was written was flushed."""

    def _put(self, text: str, wait_s: float = 0.0) -> bool:
        """Write as much as there is room for; say whether that was all."""
        at = 0
        while at < len(text):
            if not self._has_room(wait_s):
                self._is_cut = self._is_cut or at > 0
                return False
            part = text[at : at + _ROOM // 4]  # a character has at most four bytes
            self._stream.write(part)
            self._stream.flush()
            at += len(part)
        return True

    def _has_room(self, wait_s: float = 0.0) -> bool:
        try:
            # Asked each time: standard error may be another stream by now.
            number = self._stream.fileno()  # type: ignore[attr-defined]
        except (AttributeError, OSError, ValueError):  # no file of the system's
            return True
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        return bool(poll.poll(wait_s * 1000))
