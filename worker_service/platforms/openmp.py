"""Bound how long OpenMP's threads spin. Imports nothing heavy: it must run before torch is imported."""

from __future__ import annotations

import os

# Turns of a waiting thread before it sleeps. A step is some hundreds of short parallel regions, so a thread should live
# through the gap to the next one; GNU OpenMP's own 300 000 turns are milliseconds, in which it keeps the core from the
# very thread that it waits for as soon as anybody else computes here. Decode steps of the demo model, in ms at
# 1 and 32 rows on two cores: quiet 13 / 30 with 5 000 turns or more, 14.6 / 33 with 1 000, 20 / 47 with none; beside
# other busy processes 90 to 1 400 at 1 row with the default, 15 to 50 with none.
_SPINS = "5000"


def bound_spinning() -> None:
    """Set the turns, unless the environment says how OpenMP should wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
