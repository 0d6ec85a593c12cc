"""Steps that were launched and whose outcome is still on the device.

    device thread   launch 1 | launch 2 |        settle 1 | launch 3 |       settle 2 | ...
    device                   | 1 1 1 1 1 1 1 1 1 | 2 2 2 2 2 2 2 2 2 | 3 3 3 ...
    landing thread           waits for 1         , waits for 2        , ...

The device never waits for the host between two steps, and the device thread never waits for the device: a thread of its
own does, and puts a notice into the device thread's queue.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from worker_service.step_work import StepOutput, StepWork

# Launched and not settled: one that computes and one behind it. More would hide nothing, and the digest of a step is
# told apart from that of one later step only (``input_batch``).
MOST_LAUNCHED = 2


class PendingStep(Protocol):
    """A step that was launched. Settled once, in step order."""

    def admits(self, work: StepWork) -> bool:
        """Say whether ``work`` may be applied and launched before this step is settled. Device thread."""

    def wait(self) -> None:
        """Wait until the device is done with the step. Any thread; raises what went wrong there."""

    def settle(self) -> StepOutput:
        """Take what the step sampled into the batch. Waits first. Device thread."""


class Landings:
    """Waits for launched steps, one after another. The thread starts with the first of them."""

    def __init__(self, on_landed: Callable[[PendingStep], None]) -> None:
        """Call ``on_landed`` on a thread of its own when a step is done, or failed."""
        self._on_landed = on_landed
        self._queue: SimpleQueue[PendingStep | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, pending: PendingStep) -> None:
        """Wait for a step. Device thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="landing", daemon=True)
            self._thread.start()
        self._queue.put(pending)

    def close(self) -> None:
        """Have the thread end after what it waits for. Any thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            with contextlib.suppress(Exception):  # who settles the step gets it again, and says so
                pending.wait()
            self._on_landed(pending)
