"""Steps of several requests whose keys and values lie in scattered blocks."""

from __future__ import annotations

import numpy as np

from maniple_kernels.paged_attention import AttentionPlan, plan_attention


def make_plan(requests: list[tuple[int, int]], block_size: int, num_threads: int) -> tuple[AttentionPlan, int]:
    """Lay (tokens before, tokens of this step) out over scattered blocks; return the plan and the blocks in use."""
    seq_lens = np.array([before + count for before, count in requests], np.int32)
    needed = -(-seq_lens // block_size)
    ids = np.random.default_rng(1).permutation(np.arange(1, needed.sum() + 1)).astype(np.int32)
    tables = np.zeros((len(requests), needed.max()), np.int32)
    for index, (start, count) in enumerate(zip(needed.cumsum() - needed, needed, strict=True)):
        tables[index, :count] = ids[start : start + count]
    starts = np.cumsum([0, *(count for _, count in requests)]).astype(np.int32)
    return plan_attention(tables, starts, seq_lens, num_threads), int(needed.sum()) + 1


REQUESTS = {
    "decode": [(0, 1), (1, 1), (15, 1), (16, 1), (130, 1)],
    "prefill": [(0, 37), (0, 1), (0, 16)],
    "mixed": [(33, 1), (5, 29), (0, 17), (63, 9)],
}
