"""Repetition, frequency and presence penalties of rows of scores, in place: one program for some ids of a row.

With c the count of an id in the output and ``seen`` if it is in prompt or output:
``s = s / r if s > 0 else s * r`` where seen, then ``s -= frequency * c + presence * (c > 0)``. Meaning as in vLLM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


def penalize_reference(
    scores: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return what ``penalize_`` makes of ``scores``."""
    factor = torch.where(seen.bool(), repetition[:, None], 1.0)
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    return scores - frequency[:, None] * counts - presence[:, None] * (counts > 0)


@triton.jit
def penalize_tile(
    score_ptr,
    seen_ptr,
    count_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab_size,
    stride,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_id = ids < vocab_size
    score = tl.load(score_ptr + row * stride + ids, mask=is_id, other=0.0)
    seen = tl.load(seen_ptr + row * vocab_size + ids, mask=is_id, other=0)
    count = tl.load(count_ptr + row * vocab_size + ids, mask=is_id, other=0)
    factor = tl.where(seen != 0, tl.load(repetition_ptr + row), 1.0)
    score = tl.where(score > 0, score / factor, score * factor)
    score -= tl.load(frequency_ptr + row) * count.to(tl.float32)
    score -= tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(score_ptr + row * stride + ids, score, mask=is_id)


def penalize_(
    scores: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Penalize in place.

    Args:
        scores: [num_rows, vocab_size] float32, ids together.
        seen: [num_rows, vocab_size] uint8, contiguous: not 0 for ids in prompt or output.
        counts: [num_rows, vocab_size] int32, contiguous, in the output.
        repetition: [num_rows] float32, 1 is off.
        frequency: [num_rows] float32, 0 is off.
        presence: [num_rows] float32, 0 is off.
    """
    num_rows, vocab_size = scores.shape
    shape = shape_of("penalize", architecture_of(scores.device))
    penalize_tile[(num_rows, triton.cdiv(vocab_size, shape.columns))](
        scores,
        seen,
        counts,
        repetition,
        frequency,
        presence,
        vocab_size,
        scores.stride(0),
        COLUMNS=shape.columns,
        num_warps=shape.num_warps,
    )
