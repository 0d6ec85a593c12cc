"""Sample one id a row: temperature, top-k, top-p, min-p, the protocol's noise and the highest sum, in one kernel.

A greedy row or one without filters is read once. A filtered row finds two thresholds by bisection over the bits of its
scores, ordered as integers: the k-th highest score, and the highest score from which on the likeliest reach top_p. Of
those that equal that threshold the lowest ids are kept, as many as are needed: what is kept is the set of
``worker_service.sampling.sampler.kept_ids``. A row is read again for each bisection, from the cache of the device.

Sums of weights run in the order of the ids, whatever else is in the step. Maths of the noise in ``gumbel.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


@triton.jit
def _finalize(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_of(ids, k0, k1):
    """Noise of uint32 ids under the two uint32 keys of one sampled position."""
    mixed = _finalize(ids * 0x9E3779B1 + k0)
    bits = _finalize(mixed ^ k1)
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # log1p(-v), precise where v is small: 1 - v is rounded, and the logarithm is put right by as much.
    rest = 1.0 - v
    is_one = rest == 1.0
    log1p = tl.where(is_one, -v, tl.log(rest) * (v / tl.where(is_one, 1.0, 1.0 - rest)))
    return -tl.log(-log1p)


@triton.jit
def _order_of(score):
    """Bits of a float32 as an int32 that is ordered as the float is."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high):
    """The middle of two int32, rounded up, without overflow."""
    return (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)


@triton.jit
def sample_row(
    score_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    key_ptr,
    out_ptr,
    vocab_size,
    stride,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    k0 = tl.load(key_ptr + 2 * row).to(tl.uint32)
    k1 = tl.load(key_ptr + 2 * row + 1).to(tl.uint32)
    is_drawn = temperature >= 1e-5
    scores_ptr = score_ptr + row * stride
    lane = tl.arange(0, COLUMNS)
    divisor = tl.where(is_drawn, temperature, 1.0)

    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    for start in range(0, vocab_size, COLUMNS):
        score = tl.load(scores_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, score)
    top = tl.div_rn(tl.max(highest, 0), divisor)

    # Kept: score > threshold, and of those that equal it the first num_equal ids. At first all that is not -inf.
    threshold = -3.4028234663852886e38
    num_equal = vocab_size
    is_filtered = is_drawn & (top > float("-inf"))
    if is_filtered & (top_k > 0) & (top_k < vocab_size):
        low = _order_of(threshold + 0.0 * top)
        high = _order_of(top)
        while low < high:
            middle = _middle(low, high)
            count = 0
            for start in range(0, vocab_size, COLUMNS):
                score = tl.load(scores_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
                count += tl.sum((_order_of(tl.div_rn(score, divisor)) >= middle).to(tl.int32), 0)
            if count >= top_k:
                low = middle
            else:
                high = middle - 1
        threshold = tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.float32, bitcast=True)
    if is_filtered & (top_p < 1):
        total = 0.0
        for start in range(0, vocab_size, COLUMNS):
            score = tl.load(scores_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
            score = tl.div_rn(score, divisor)
            total += tl.sum(tl.where(score >= threshold, tl.exp(score - top), 0.0), 0)
        wanted = top_p * total
        low = _order_of(threshold + 0.0 * top)
        high = _order_of(top)
        while low < high:
            middle = _middle(low, high)
            weight = 0.0
            for start in range(0, vocab_size, COLUMNS):
                score = tl.load(scores_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
                score = tl.div_rn(score, divisor)
                weight += tl.sum(tl.where(_order_of(score) >= middle, tl.exp(score - top), 0.0), 0)
            if weight >= wanted:
                low = middle
            else:
                high = middle - 1
        nucleus = tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.float32, bitcast=True)
        above = 0.0
        for start in range(0, vocab_size, COLUMNS):
            score = tl.load(scores_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
            score = tl.div_rn(score, divisor)
            above += tl.sum(tl.where(score > nucleus, tl.exp(score - top), 0.0), 0)
        num_equal = tl.maximum(tl.ceil((wanted - above) / tl.exp(nucleus - top)), 1.0).to(tl.int32)
        threshold = nucleus
    if is_filtered & (min_p > 0):
        least = top + tl.log(min_p)
        if least > threshold:
            threshold = least
            num_equal = vocab_size

    best = float("-inf")
    best_id = 0
    num_seen = 0  # that equal the threshold
    for start in range(0, vocab_size, COLUMNS):
        ids = start + lane
        score = tl.load(scores_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        score = tl.div_rn(score, divisor)
        if is_filtered:
            equals = (score == threshold).to(tl.int32)
            place = num_seen + tl.cumsum(equals, 0)  # from 1
            is_kept = (score > threshold) | ((equals == 1) & (place <= num_equal))
            score = tl.where(is_kept, score + noise_of(ids.to(tl.uint32), k0, k1), float("-inf"))
            num_seen += tl.sum(equals, 0)
        here = tl.max(score, 0)
        if here > best:
            best = here
            best_id = start + tl.argmax(score, 0)  # the first of equals
    tl.store(out_ptr + row, best_id)


def sample(
    scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor, out: Tensor
) -> None:
    """Sample one id of each row.

    Args:
        scores: [num_rows, vocab_size] float32, ids together; -inf is never drawn unless nothing else is there, then 0.
        temperature: [num_rows] float32; below 1e-5 the highest score wins.
        top_k: [num_rows] int32, 0 is off.
        top_p: [num_rows] float32, 1 is off.
        min_p: [num_rows] float32, 0 is off.
        keys: [num_rows, 2] uint32 bits as int32: k0 and k1 of each row's position.
        out: [num_rows] int32, written.
    """
    num_rows, vocab_size = scores.shape
    shape = shape_of("sample", architecture_of(scores.device))
    sample_row[(num_rows,)](
        scores,
        temperature,
        top_k,
        top_p,
        min_p,
        keys,
        out,
        vocab_size,
        scores.stride(0),
        COLUMNS=min(shape.columns, triton.next_power_of_2(vocab_size)),
        num_warps=shape.num_warps,
    )


def keys_on(device: torch.device, keys: npt.NDArray[np.uint32]) -> Tensor:
    """Return keys of the host as the int32 tensor that ``sample`` reads."""
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int32)).to(device, non_blocking=True)
