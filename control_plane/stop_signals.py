"""Hear SIGTERM and SIGINT: the first asks to stop in good order, the second to hurry."""

from __future__ import annotations

import asyncio
import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Signals of this process while its ``with`` block lasts. For the main thread's event loop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.first: signal.Signals | None = None

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

    def _hear(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.stop.set()
        else:
            self.hurry.set()
