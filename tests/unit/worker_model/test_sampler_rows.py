"""The sampler over many rows: draws follow the exact distribution, and no row's parameters reach another row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from service_chassis.protocol.logprobs import Logprobs
from worker_service.input_batch import InputBatch
from worker_service.sampling.logprobs import OutputLogprobs
from worker_service.sampling.sampler import Sampler
from worker_service.sampling.tensor_logprobs import report_tensors
from worker_service.step_work import Mode, NewRow, RowSampling, StepWork

VOCAB = 23


def batch_of(rows: dict[int, tuple[list[int], RowSampling]], *, max_num_seqs: int = 8) -> InputBatch:
    """Make a batch of req_index -> (prompt, sampling)."""
    batch = InputBatch(
        max_num_seqs=max_num_seqs, max_model_len=40, max_num_batched_tokens=40, block_size=4, vocab_size=VOCAB
    )
    new = [
        NewRow(
            req_index=row,
            row_key=row,
            request_id=f"r{row}",
            sample_index=row % 3,
            token_ids=np.array(prompt, np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            num_prefill_tokens=len(prompt),
            sampling=sampling,
        )
        for row, (prompt, sampling) in rows.items()
    ]
    batch.apply(StepWork(step=1, mode=Mode.APPLY_ONLY, new_rows=tuple(new)))
    return batch


def exact(logits: Tensor, sampling: RowSampling) -> np.ndarray[Any, Any]:
    """Return the distribution that a row draws from, in float64, by the words of sampling.proto."""
    scores = logits.double().numpy() / sampling.temperature
    kept = np.argsort(-scores)
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    weights = np.exp(scores[kept] - scores.max())
    if sampling.top_p < 1:
        count = int(np.argmax(np.cumsum(weights) / weights.sum() >= sampling.top_p)) + 1
        kept, weights = kept[:count], weights[:count]
    likely = weights >= sampling.min_p * weights[0]
    found = np.zeros(VOCAB)
    found[kept[likely]] = weights[likely]
    return found / found.sum()


@pytest.mark.parametrize(
    "choice",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "min_p": 0.08},
        {"temperature": 1.0, "top_k": 12, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=["plain", "min_p", "all"],
)
def test_draws_of_many_seeds_follow_the_exact_distribution(choice: dict[str, Any]) -> None:
    """Chi-square of 20 000 draws: 200 rows with seeds of their own at 100 positions each."""
    torch.set_num_threads(1)
    num_rows, num_positions = 200, 100
    rows = np.arange(num_rows, dtype=np.int32)
    batch = batch_of({row: ([1], RowSampling(seed=row, **choice)) for row in range(num_rows)}, max_num_seqs=num_rows)
    sampler = Sampler(batch)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
    counts = np.zeros(VOCAB)
    for position in range(num_positions):
        batch.num_tokens[:] = position  # the noise is a function of it; nothing else reads it here
        counts += np.bincount(sampler.sample(logits.repeat(num_rows, 1), rows), minlength=VOCAB)
    wanted = exact(logits, RowSampling(**choice)) * num_rows * num_positions
    assert counts[wanted == 0].sum() == 0
    kept = wanted > 0
    chi_square = float(((counts[kept] - wanted[kept]) ** 2 / wanted[kept]).sum())
    # 99.9 % of the distribution lie below, by Wilson and Hilferty; seeds are fixed.
    freedom = int(kept.sum()) - 1
    assert freedom >= 3
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


ids = st.integers(0, VOCAB - 1)
SAMPLING = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.4, 0.9]),
    top_k=st.sampled_from([0, 0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.1]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 2]),
    stop_ids=st.lists(ids, max_size=3, unique=True).map(tuple),
    logit_bias=st.dictionaries(ids, st.floats(-3, 3, width=32), max_size=3).map(lambda bias: tuple(bias.items())),
    allowed_token_ids=st.one_of(st.just(()), st.sets(ids, min_size=4).map(lambda some: tuple(sorted(some)))),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    num_logprobs=st.sampled_from([None, None, 0, 3]),
    logprobs_mode=st.sampled_from([1, 2, 3]),
)
ROW = st.tuples(st.lists(ids, min_size=1, max_size=6), SAMPLING)


def sample_some(batch: InputBatch, rows: list[int], logits: Tensor) -> dict[int, list[tuple[int, Logprobs | None]]]:
    """Draw three tokens for each row, all rows at once; ``logits`` are [3, 8, VOCAB]."""
    sampler, which = Sampler(batch), np.array(rows, np.int32)
    drawn: dict[int, list[tuple[int, Logprobs | None]]] = {row: [] for row in rows}
    for scores in logits:
        noting = OutputLogprobs(batch.sampling.logprobs, which)
        token_ids = sampler.sample(scores[rows].clone(), which, noting)
        told = noting.take(token_ids, report_tensors)
        batch.append(which, token_ids)
        for row, token_id in zip(rows, token_ids.tolist(), strict=True):
            drawn[row].append((token_id, told.get(row)))
    return drawn


@settings(max_examples=120, deadline=None)
@given(rows=st.dictionaries(st.integers(0, 7), ROW, min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_no_parameter_of_a_row_changes_what_another_row_gets(
    rows: dict[int, tuple[list[int], RowSampling]], seed: int
) -> None:
    logits = torch.randn((3, 8, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2
    order = sorted(rows)
    together = sample_some(batch_of(rows), order, logits)
    for row in order:
        assert sample_some(batch_of({row: rows[row]}), [row], logits)[row] == together[row]
