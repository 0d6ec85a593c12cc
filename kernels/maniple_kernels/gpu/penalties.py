"""Repetition, frequency and presence penalties of some rows of scores, in place: one program for some ids of a row.

With c the count of an id in the output and ``seen`` if it is in prompt or output:
``s = s / r if s > 0 else s * r`` where seen, then ``s -= frequency * c``, then ``s -= presence`` where c > 0. Meaning
as in vLLM. A finite score stays finite: what the repetition penalty makes of it is held within half of what float32
holds. Products are exact and each step is rounded once, as on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of

_HIGHEST = torch.finfo(torch.float32).max / 2


def penalize_reference(
    scores: Tensor,
    rows: Tensor,
    slots: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Return what ``penalize_`` makes of ``scores``."""
    places, slots = rows.long(), slots.long()
    own, counts = scores[places], counts[slots]
    factor = repetition[:, None]
    penalized = torch.where(own > 0, own / factor, own * factor).clamp(-_HIGHEST, _HIGHEST)
    own = torch.where(seen[slots].bool() & own.isfinite() & (factor != 1), penalized, own)
    own = (own.double() - frequency[:, None].double() * counts).float()
    scores = scores.clone()
    scores[places] = own - presence[:, None] * (counts > 0)
    return scores


@triton.jit
def penalize_tile(
    score_ptr,
    row_ptr,
    slot_ptr,
    seen_ptr,
    count_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab_size,
    stride,
    COLUMNS: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(row_ptr + place).to(tl.int64)
    slot = tl.load(slot_ptr + place).to(tl.int64)
    ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_id = ids < vocab_size
    score = tl.load(score_ptr + row * stride + ids, mask=is_id, other=0.0)
    seen = tl.load(seen_ptr + slot * vocab_size + ids, mask=is_id, other=0)
    count = tl.load(count_ptr + slot * vocab_size + ids, mask=is_id, other=0)
    factor = tl.load(repetition_ptr + place)
    penalized = tl.where(score > 0, tl.div_rn(score, tl.where(score > 0, factor, 1.0)), score * factor)
    penalized = tl.minimum(tl.maximum(penalized, -1.7014117331926443e38), 1.7014117331926443e38)
    is_infinite = (score > 3.4028234663852886e38) | (score < -3.4028234663852886e38)
    penalized = tl.where(is_infinite, score, penalized)
    if factor != 1.0:
        score = tl.where(seen != 0, penalized, score)
    frequency = tl.load(frequency_ptr + place).to(tl.float64)
    score = (score.to(tl.float64) - frequency * count.to(tl.float64)).to(tl.float32)
    score -= tl.where(count > 0, tl.load(presence_ptr + place), 0.0)
    tl.store(score_ptr + row * stride + ids, score, mask=is_id)


def penalize_(
    scores: Tensor,
    rows: Tensor,
    slots: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalize in place.

    Args:
        scores: [num_rows, vocab_size] float32, ids together.
        rows: [num_penalized] int32, distinct places in ``scores``.
        slots: [num_penalized] int32, where ``seen`` and ``counts`` have what belongs to them.
        seen: [num_slots, vocab_size] uint8, contiguous: not 0 for ids in prompt or output.
        counts: [num_slots, vocab_size] int32, contiguous, in the output.
        repetition: [num_penalized] float32, 1 is off.
        frequency: [num_penalized] float32, 0 is off.
        presence: [num_penalized] float32, 0 is off.
    """
    vocab_size = scores.shape[1]
    shape = shape_of("penalize", architecture_of(scores.device))
    penalize_tile[(len(rows), triton.cdiv(vocab_size, shape.columns))](
        scores,
        rows,
        slots,
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
