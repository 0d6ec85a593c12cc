"""How threads of a kernel share a loop's items."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numba
import numpy as np
import pytest
from numba import njit, prange

from maniple_kernels.cpu.claims import claim, nothing_taken


@njit(parallel=True)
def _visit(num_items, visits, by, slow_turns, num_threads):
    taken = nothing_taken(num_threads)
    for thread in prange(num_threads):
        item, helped = claim(taken, num_items, thread, 0)
        while item < num_items:
            visits[item] += 1
            by[item] = thread
            if thread == 0:
                for turn in range(slow_turns):
                    visits[num_items + turn % 2] += 1
            item, helped = claim(taken, num_items, thread, helped)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> int:
    before = numba.get_num_threads()
    wanted = min(request.param, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(wanted)
    yield wanted
    numba.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("num_items", [0, 1, 2, 7, 1000])
def test_every_item_is_taken_once(threads: int, num_items: int) -> None:
    visits, by = np.zeros(num_items + 2, np.int64), np.full(num_items, -1, np.int64)
    _visit(num_items, visits, by, 0, threads)
    assert visits[:num_items].tolist() == [1] * num_items
    assert set(by.tolist()) <= set(range(threads))


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_who_is_done_helps_who_is_not(threads: int) -> None:
    visits, by = np.zeros(1002, np.int64), np.full(1000, -1, np.int64)
    _visit(1000, visits, by, 200_000, threads)
    assert visits[:1000].tolist() == [1] * 1000
    assert np.count_nonzero(by == 0) < 500  # of which it had the first
