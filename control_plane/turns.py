"""Let the readers of streams run a few at a time, so that the next step is planned before the last of them has written.

A step gives hundreds of streams a token each, and writing one costs some 60 µs: woken together, they would hold the
event loop for longer than a step takes, and the device would wait. So they take turns. Whoever waits for its turn
meanwhile gets more tokens in one message, which is what makes many streams affordable at all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

# Readers that run between two looks at what else has happened: about half a millisecond.
AT_ONCE = 8

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


class Turns:
    """The turns of one event loop, first come, first served."""

    def __init__(self) -> None:
        self._left = AT_ONCE  # of the present pass of the loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_armed = False  # the next pass will be noticed

    @classmethod
    def here(cls) -> Turns:
        """Return those of the running loop: what readers share is its time, whichever engine they read from."""
        loop = asyncio.get_running_loop()
        turns = _of_loops.get(loop)
        if turns is None:
            turns = _of_loops[loop] = cls()
        return turns

    def take(self) -> bool:
        """Take a turn at once; False: there is none, get in line."""
        if self._waiting or not self._left:
            return False
        self._left -= 1
        self._arm()
        return True

    def line_up(self, waiter: asyncio.Future[None]) -> None:
        """Resolve a future when its turn comes. One that was cancelled meanwhile takes none."""
        self._waiting.append(waiter)
        self._arm()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._is_armed = False
        self._left = AT_ONCE
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            self._arm()
