"""Log-probability and rank of one given id of each row, without a log-softmax of the whole row: one program a row.

``logprob = s_id - m - log(sum_j exp(s_j - m))`` with m the highest score;
the rank counts ids with a higher score, and lower ids with the same, from 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


def gather_logprobs_reference(scores: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``gather_logprobs``."""
    own = scores.gather(1, token_ids[:, None].long())
    logprobs = scores.float().log_softmax(-1).gather(1, token_ids[:, None].long())[:, 0]
    is_lower_id = torch.arange(scores.shape[1], device=scores.device) < token_ids[:, None]
    ranks = ((scores > own) | ((scores == own) & is_lower_id)).sum(1).to(torch.int32) + 1
    return logprobs, ranks, scores.float().logsumexp(-1)


@triton.jit
def gather_row(score_ptr, id_ptr, logprob_ptr, rank_ptr, normalizer_ptr, vocab_size, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COLUMNS)
    token_id = tl.load(id_ptr + row)
    own = tl.load(score_ptr + row * stride + token_id)
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    for start in range(0, vocab_size, COLUMNS):
        score = tl.load(score_ptr + row * stride + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, score)
    top = tl.max(highest, 0)
    weights = tl.zeros([COLUMNS], tl.float32)
    num_higher = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, vocab_size, COLUMNS):
        score = tl.load(score_ptr + row * stride + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        weights += tl.exp(score - top)
        num_higher += ((score > own) | ((score == own) & (start + lane < token_id))).to(tl.int32)
    total = tl.log(tl.sum(weights, 0))
    tl.store(logprob_ptr + row, own - top - total)
    tl.store(normalizer_ptr + row, top + total)
    tl.store(rank_ptr + row, tl.sum(num_higher, 0) + 1)


def gather_logprobs(scores: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Look up.

    Args:
        scores: [num_rows, vocab_size] float32, ids together.
        token_ids: [num_rows] int32.
    Returns:
        [num_rows] float32 log-probabilities; [num_rows] int32 ranks, 1 the likeliest; and [num_rows] float32 logarithms
        of the sums, by which any score becomes a log-probability.
    """
    num_rows, vocab_size = scores.shape
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=scores.device)
    normalizers = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    shape = shape_of("logprobs", architecture_of(scores.device))
    gather_row[(num_rows,)](
        scores,
        token_ids,
        logprobs,
        ranks,
        normalizers,
        vocab_size,
        scores.stride(0),
        COLUMNS=min(shape.columns, triton.next_power_of_2(vocab_size)),
        num_warps=shape.num_warps,
    )
    return logprobs, ranks, normalizers
