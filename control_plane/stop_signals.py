"""Hear SIGTERM and SIGINT: the first asks to stop in good order, the second to hurry."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Signals of this process while its ``with`` block lasts. For the main thread's event loop.

    The interpreter needs a moment to end after the block. Who set ``exit_code`` has nothing left to do by then, so that
    a signal which comes so late ends the process with that code, and not as if it had been killed.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.first: signal.Signals | None = None
        self.exit_code: int | None = None

    @property
    def name(self) -> str:
        """What people call the first signal."""
        return "" if self.first is None else "Ctrl-C" if self.first is signal.SIGINT else self.first.name

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._hear, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            if self.exit_code is not None:
                signal.signal(number, self._leave)
                # In its last part the interpreter takes handlers away, but leaves alone what is ignored.
                atexit.register(signal.signal, number, signal.SIG_IGN)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        os._exit(self.exit_code or 0)

    def _hear(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.stop.set()
        else:
            self.hurry.set()
