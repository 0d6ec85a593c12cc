"""Choose how many threads a kernel call takes."""

# mypy: ignore-errors
# (numba's settings are made at run time)
from __future__ import annotations

import threading

import numba
import torch

# Single operations below which a call stays on its own thread. Waking others costs microseconds on a quiet machine, and
# where somebody else holds a core the barrier at the end waits for a time slice: 4 ms were seen for 0.3 ms of work.
_GRAIN = 1 << 18

_set = threading.local()  # how many each thread chose last: to say so again takes 20 microseconds


def use_threads(num_operations: int) -> int:
    """Let the next kernel of this thread run on as many threads as its work is worth, of those that torch may use.

    Returns:
        How many.
    """
    wanted = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, 1 + num_operations // _GRAIN)
    if getattr(_set, "count", 0) != wanted:
        numba.set_num_threads(wanted)
        _set.count = wanted
    return wanted
