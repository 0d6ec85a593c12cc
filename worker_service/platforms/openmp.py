"""Tell OpenMP's threads to sleep while they wait. Imports nothing heavy: it must run before torch is imported."""

from __future__ import annotations

import os


def let_waiting_threads_sleep() -> None:
    """Set OpenMP's wait policy, unless the environment has one.

    By default a thread that has nothing to do spins, and so takes the core from the thread that it waits for as soon as
    anybody else computes on the machine. One decode step of the demo model on two cores shared with other busy processes
    took 90 to 1 400 ms spinning and 17 to 50 ms sleeping.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
