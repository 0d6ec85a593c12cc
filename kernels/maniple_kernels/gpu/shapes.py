"""Tile sizes, warps and pipeline stages of every kernel, by architecture: the one table to tune.

An architecture is named by its compute capability, major version times ten: 80 (A100, and all before Hopper), 90 (H100,
H200), 100 (Blackwell). What is not listed for one takes the row of the next older. Every row compiles without spills
and without a stack for all of them, which ``python -m maniple_kernels.gpu.aot --all`` shows; none was timed yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one kernel is launched."""

    rows: int = 1  # queries, rows or tokens of one program
    columns: int  # keys, ids or elements that a program takes at a time
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKey:
    """Which attention is launched."""

    kernel: str  # paged_decode or paged_prefill
    architecture: int
    width: int  # of a head, padded to a power of two
    itemsize: int  # bytes of one element of the cache


ARCHITECTURES = (80, 90, 100)

# Attention, by (bytes of one element, widest head): rows are query heads times queries, columns are keys.
_ATTENTION: dict[str, dict[tuple[int, int], dict[int, Shape]]] = {
    "paged_decode": {
        (2, 64): {80: Shape(rows=16, columns=64, num_warps=4, num_stages=3)},
        (2, 128): {
            80: Shape(rows=16, columns=32, num_warps=4, num_stages=3),
            90: Shape(rows=16, columns=128, num_warps=8, num_stages=3),
        },
        (2, 256): {80: Shape(rows=16, columns=32, num_warps=8, num_stages=3)},
        (4, 64): {80: Shape(rows=16, columns=32, num_warps=8, num_stages=3)},
        (4, 128): {80: Shape(rows=16, columns=32, num_warps=8, num_stages=3)},
        (4, 256): {80: Shape(rows=16, columns=16, num_warps=8, num_stages=2)},
    },
    "paged_prefill": {
        (2, 64): {
            80: Shape(rows=64, columns=64, num_warps=4, num_stages=2),
            90: Shape(rows=128, columns=64, num_warps=8, num_stages=2),
        },
        (2, 128): {
            80: Shape(rows=64, columns=32, num_warps=8, num_stages=2),
            90: Shape(rows=64, columns=64, num_warps=8, num_stages=2),
            100: Shape(rows=128, columns=64, num_warps=8, num_stages=2),
        },
        (2, 256): {80: Shape(rows=32, columns=32, num_warps=8, num_stages=2)},
        (4, 64): {80: Shape(rows=32, columns=32, num_warps=8, num_stages=2)},
        (4, 128): {80: Shape(rows=16, columns=16, num_warps=8, num_stages=2)},
        (4, 256): {80: Shape(rows=16, columns=16, num_warps=8, num_stages=2)},
    },
}
_OTHERS: dict[str, dict[int, Shape]] = {
    "merge_splits": {80: Shape(columns=1, num_warps=4)},
    "store_kv": {80: Shape(columns=1024, num_warps=4)},
    "rms_norm": {80: Shape(columns=4096, num_warps=8)},
    "norm_and_rotate": {80: Shape(rows=8, columns=1, num_warps=4)},
    "gate": {80: Shape(columns=1024, num_warps=4)},
    "sample": {80: Shape(columns=4096, num_warps=8), 90: Shape(columns=8192, num_warps=16)},
    "penalize": {80: Shape(columns=1024, num_warps=4)},
    "mask": {80: Shape(columns=2048, num_warps=4)},
    "logprobs": {80: Shape(columns=4096, num_warps=8)},
}
WIDEST_HEAD = 256
_preferred: dict[AttentionKey, Shape] = {}  # found by measurement on this machine


def prefer_shape(key: AttentionKey, shape: Shape) -> None:
    """Launch attention by another shape than the table's, in this process. Before it is launched or recorded."""
    _preferred[key] = shape


def shape_of(kernel: str, architecture: int) -> Shape:
    """Return how a kernel that is no attention is launched on ``architecture``, a compute capability times ten."""
    return _newest(_OTHERS[kernel], architecture)


def attention_shape(kernel: str, architecture: int, *, width: int, itemsize: int) -> Shape:
    """Return how attention is launched.

    Args:
        kernel: paged_decode or paged_prefill.
        architecture: compute capability times ten.
        width: of a head, padded to a power of two.
        itemsize: bytes of one element of the cache: 2 or 4.
    Raises:
        ValueError: heads are too wide.
    """
    key = AttentionKey(kernel=kernel, architecture=architecture, width=width, itemsize=itemsize)
    if (preferred := _preferred.get(key)) is not None:
        return preferred
    known = _ATTENTION[kernel]
    wide_enough = [widest for size, widest in known if size == itemsize and widest >= width]
    if not wide_enough:
        raise ValueError(f"heads of {width} elements of {itemsize} bytes: at most {WIDEST_HEAD} of 2 or 4 are served")
    return _newest(known[itemsize, min(wide_enough)], architecture)


def _newest(listed: dict[int, Shape], architecture: int) -> Shape:
    return listed[max((one for one in listed if one <= architecture), default=min(listed))]
