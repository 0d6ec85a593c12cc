"""Have streams say something now and then: proxies end those that are silent, nginx after 60 s and Envoy after 300 s.

A request may be silent for as long as it waits in the queue, is paused, or has its output kept back for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from control_plane.generation_stream import GenerationStream

# No stream is silent for longer.
WITHIN_S = 10.0


class Voice:
    """One stream, and whether its client heard anything since we last looked."""

    __slots__ = ("_stream", "has_spoken")

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream
        self.has_spoken = True

    def look(self) -> None:
        """Have it say that it waits, if it said nothing."""
        if not self.has_spoken:
            self._stream.put_waiting()
        self.has_spoken = False


class Silence:
    """All streams of a door. One look at all of them, twice in the time allowed, costs none of them a timer."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        """Let no stream be silent for longer than this."""
        self._period_s = within_s / 2
        self._voices: set[Voice] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def broken_on(self, stream: GenerationStream) -> Iterator[Voice]:
        """Look at a stream until the block ends."""
        voice = Voice(stream)
        self._voices.add(voice)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)
        try:
            yield voice
        finally:
            self._voices.discard(voice)

    def _look(self) -> None:
        for voice in self._voices:
            voice.look()
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look) if self._voices else None
