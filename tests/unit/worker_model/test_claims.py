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
def _visit(num_items, visits, by, num_threads):
    taken = nothing_taken(num_threads)
    for thread in prange(num_threads):
        item, helped = claim(taken, num_items, thread, 0)
        while item < num_items:
            visits[item] += 1
            by[item] = thread
            item, helped = claim(taken, num_items, thread, helped)


@njit
def _begin(num_threads):
    return nothing_taken(num_threads)


@njit
def _take(taken, num_items, thread, helped):
    return claim(taken, num_items, thread, helped)


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
    visits, by = np.zeros(num_items, np.int64), np.full(num_items, -1, np.int64)
    _visit(num_items, visits, by, threads)
    assert visits.tolist() == [1] * num_items
    assert set(by.tolist()) <= set(range(threads))


def test_who_is_done_helps_who_is_not() -> None:
    taken = _begin(2)
    assert _take(taken, 9, 0, 0) == (0, 0)  # and there it stays for a while
    helped, items = 0, []
    for _ in range(8):
        item, helped = _take(taken, 9, 1, helped)
        items.append(item)
    assert items == [4, 5, 6, 7, 8, 1, 2, 3]  # its own, in order, and then the other's
    assert _take(taken, 9, 1, helped)[0] == 9  # none is left, for neither
    assert _take(taken, 9, 0, 0)[0] == 9
