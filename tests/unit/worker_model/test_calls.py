"""A function that is called by its address gets what it was compiled for, or the call does not compile."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
import pytest

from maniple_kernels.backend import has_cpu_kernels

if not has_cpu_kernels():
    pytest.skip("numba or an OpenMP library is missing: there is nothing to compile", allow_module_level=True)

from numba import njit, prange, types
from numba.core.errors import TypingError

from maniple_kernels.cpu.calls import address_of, array, caller

KINDS = (types.int64, types.UniTuple(types.int64, 2), types.float32, array(types.float32))


@njit
def put(place, pair, value, out):
    """Write into ``out[place]``."""
    if place < 0:
        raise ValueError("before the first")
    out[place] = value * pair[0] + pair[1]


call = caller(lambda given: KINDS)


@njit(parallel=True)
def put_all(address, value, out):
    """Write all of ``out``, from threads."""
    for i in prange(len(out)):
        call(address, (np.int64(i), (2, 1), value, out))


@njit
def put_before(address, out):
    """Ask for what is refused."""
    call(address, (-1, (2, 1), np.float32(1.0), out))


def test_arguments_arrive_in_threads() -> None:
    out = np.zeros(1000, np.float32)
    put_all(address_of(put, KINDS), np.float32(1.5), out)
    assert (out == 4).all()


def test_an_error_comes_through() -> None:
    with pytest.raises(ValueError, match="before the first"):
        put_before(address_of(put, KINDS), np.zeros(1, np.float32))


def test_an_address_is_the_same_when_asked_again() -> None:
    assert address_of(put, KINDS) == address_of(put, KINDS)


@pytest.mark.parametrize(
    "given",
    [
        (np.float64(0.5), np.zeros(1, np.float32)),  # a wider number
        (np.float32(0.5), np.zeros(1, np.float64)),  # elements of another size
        (np.float32(0.5), np.zeros((1, 1), np.float32)),  # another shape
        (np.float32(0.5), np.zeros(4, np.float32)[::2]),  # elements that lie apart
    ],
)
def test_other_types_do_not_compile(given: tuple[object, object]) -> None:
    with pytest.raises(TypingError, match="was called with"):
        put_all(address_of(put, KINDS), *given)


def test_too_few_arguments_do_not_compile() -> None:
    @njit
    def put_less(address, out):
        call(address, (0, (2, 1), out))

    with pytest.raises(TypingError, match="was called with"):
        put_less(address_of(put, KINDS), np.zeros(1, np.float32))
