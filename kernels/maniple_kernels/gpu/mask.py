"""Make ids impossible where a bit of a row's mask is 0.

Bits as in SampleInput: least significant first, in 32-bit words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


def apply_mask_reference(scores: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """Return what ``apply_mask_`` makes of ``scores``."""
    shifts = torch.arange(32, device=bits.device)
    is_allowed = ((bits[:, :, None].long() >> shifts) & 1).flatten(1)[:, : scores.shape[1]].bool()
    scores = scores.clone()
    scores[rows.long()] = scores[rows.long()].masked_fill(~is_allowed, float("-inf"))
    return scores


@triton.jit
def mask_tile(score_ptr, row_ptr, bit_ptr, vocab_size, stride, num_words, COLUMNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(row_ptr + place).to(tl.int64)
    word = tl.load(bit_ptr + place * num_words + ids // 32, mask=ids < vocab_size, other=0)
    is_forbidden = ((word >> (ids % 32)) & 1) == 0
    refused = tl.full([COLUMNS], float("-inf"), tl.float32)
    tl.store(score_ptr + row * stride + ids, refused, mask=is_forbidden & (ids < vocab_size))


def apply_mask_(scores: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Forbid ids in place.

    Args:
        scores: [num_rows, vocab_size] float32, ids together.
        rows: [num_masked] int32, distinct places in ``scores``.
        bits: [num_masked, ceil(vocab_size / 32)] int32, contiguous; 1 is allowed.
    """
    vocab_size = scores.shape[1]
    shape = shape_of("mask", architecture_of(scores.device))
    mask_tile[(len(rows), triton.cdiv(vocab_size, shape.columns))](
        scores,
        rows,
        bits,
        vocab_size,
        scores.stride(0),
        bits.shape[1],
        COLUMNS=shape.columns,
        num_warps=shape.num_warps,
    )
