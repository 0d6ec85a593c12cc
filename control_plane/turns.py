"""Let the readers of streams run a few at a time, so that the next step is planned before the last of them has written.

A step gives hundreds of streams a token each, and writing one message costs some 40 µs: woken together, they would hold
the event loop for longer than a step takes, and the device would wait. So they take turns, first come, first served.
Whoever waits for its turn meanwhile gets more tokens in one message, which is what makes many streams affordable.

And there are only so many turns a second that the loop has time left for nothing at all: a loop that is never idle sees
late that a step has come back, and the device waits again. How many that are is found out: more while the loop is idle
for more than a quarter of the time, fewer while it is not, but never so few that engines which could use all of the
time starve the readers. Where fewer streams are read than that, everybody runs at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

# Readers in one pass of the loop, until somebody looks again whether a step has come back.
FEW = 2
# Of the time, beyond which there are fewer turns.
MOST_BUSY = 0.75
# Turns a second: at first, at least (a third of the time of a slow core), and at most.
FIRST_RATE, LEAST_RATE, MOST_RATE = 10_000.0, 8_000.0, 100_000.0
# How often the rate is looked at, and what it is changed by then.
LOOK_EVERY_S, CHANGE = 0.05, 1.1
# What is saved up when nobody reads: a slow device's step wakes its readers all at once.
SAVED_S = 0.03
# How late a timer of an idle loop may be.
_PUNCTUAL_S = 0.0015

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


class Turns:
    """The turns of one event loop, in whose thread it is used."""

    def __init__(self) -> None:
        self.rate = FIRST_RATE  # turns a second
        self._saved = SAVED_S * self.rate  # turns
        self._saved_at = self._looked_at = time.monotonic()
        self._cpu_at_look_s = time.thread_time()
        self._busy_s = 0.0  # since then, as far as passes show
        self._left = FEW  # of the present pass of the loop
        self._num_given = 0  # in the present pass
        self._pass_at = 0.0  # when it began, if the next one follows at once; else when that is due
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._next: asyncio.Handle | None = None  # what begins the next pass
        self._follows = False  # it is the very next of the loop

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
        if self._waiting or not self._left or self._saved < 1:
            return False
        self._give()
        self._go_on()
        return True

    def line_up(self, waiter: asyncio.Future[None]) -> None:
        """Resolve a future when its turn comes. One that was cancelled meanwhile takes none."""
        self._waiting.append(waiter)
        self._go_on()

    def _give(self) -> None:
        self._left -= 1
        self._num_given += 1
        self._saved -= 1

    def _go_on(self) -> None:
        """See to it that there is a next pass: at once, or as soon as there are turns again."""
        if self._next is not None:
            return
        loop = asyncio.get_running_loop()
        self._follows = self._saved >= 1
        self._pass_at = time.monotonic()
        if self._follows:
            self._next = loop.call_soon(self._begin_pass)
        else:
            delay_s = (FEW - self._saved) / self.rate
            self._pass_at += delay_s
            self._next = loop.call_later(delay_s, self._begin_pass)

    def _begin_pass(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._look(now)
        self._saved = min(self._saved + self.rate * (now - self._saved_at), SAVED_S * self.rate)
        # Engines that take long for a pass leave readers their part of the next one.
        pass_s = now - self._pass_at if self._follows else 0.0
        self._left = max(FEW, int(self.rate * pass_s))
        self._busy_s += pass_s if self._follows else max(now - self._pass_at - _PUNCTUAL_S, 0.0)
        self._next, self._saved_at, self._num_given = None, now, 0
        while self._waiting and self._left and self._saved >= 1:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._give()
        if self._num_given or self._waiting:
            self._go_on()

    def _look(self, now: float) -> None:
        cpu_s = time.thread_time()
        # On a machine that has no core left for it, a loop has much to do and little time: passes show that, its own
        # processor time does not. And passes do not show what is done while no reader waits.
        busy_s = max(cpu_s - self._cpu_at_look_s, self._busy_s)
        self.rate = changed_rate(self.rate, busy_s / (now - self._looked_at))
        self._looked_at, self._cpu_at_look_s, self._busy_s = now, cpu_s, 0.0


def changed_rate(rate: float, busy: float) -> float:
    """Return the rate of turns that follows on one under which the loop was busy for this part of the time."""
    changed = rate / CHANGE if busy > MOST_BUSY else rate * CHANGE
    return min(max(changed, LEAST_RATE), MOST_RATE)
