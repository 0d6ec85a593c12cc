"""The sampler: transformers' processors are the independent source of what each parameter means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from worker_service.input_batch import InputBatch
from worker_service.sampling.sampler import NonFiniteLogits, Sampler, kept_ids
from worker_service.step_work import Mode, NewRow, RowSampling, StepWork

VOCAB = 97


def make_batch(
    rows: dict[int, tuple[Sequence[int], int, RowSampling]], *, vocab_size: int = VOCAB, max_num_seqs: int = 8
) -> InputBatch:
    """Make a batch of req_index -> (known tokens, of them prompt, sampling)."""
    torch.set_num_threads(1)
    batch = InputBatch(
        max_num_seqs=max_num_seqs, max_model_len=64, max_num_batched_tokens=64, block_size=16, vocab_size=vocab_size
    )
    new = tuple(
        NewRow(
            req_index=row,
            row_key=row,
            request_id=f"r{row}",
            sample_index=0,
            token_ids=np.array(tokens, np.int32),
            num_prompt_tokens=num_prompt_tokens,
            num_computed_tokens=0,
            num_prefill_tokens=len(tokens),
            sampling=sampling,
        )
        for row, (tokens, num_prompt_tokens, sampling) in rows.items()
    )
    batch.apply(StepWork(step=1, mode=Mode.APPLY_ONLY, new_rows=new))
    return batch


def random_logits(num_rows: int, *, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(sampling: RowSampling, tokens: Sequence[int], num_prompt_tokens: int, logits: Tensor) -> Tensor:
    """Return what the sampler makes of one row's scores before it chooses."""
    batch = make_batch({2: (tokens, num_prompt_tokens, sampling)})
    scores = logits.clone()
    chosen = Sampler(batch).sample(scores, np.array([2], np.int32))
    assert chosen[0] == scores[0].argmax()  # greedy; the scores were changed in place
    return scores


def test_greedy_takes_the_lowest_of_equals() -> None:
    batch = make_batch({1: ([5], 1, RowSampling()), 3: ([5], 1, RowSampling(temperature=1e-6))})
    logits = torch.zeros(2, VOCAB)
    logits[:, [40, 11, 90]] = 2.0
    assert Sampler(batch).sample(logits, np.array([1, 3], np.int32)).tolist() == [11, 11]


def test_repetition_penalty_is_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    tokens, logits = [3, 9, 9, 14, 50, 3], random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    torch.testing.assert_close(adjusted(RowSampling(repetition_penalty=1.7), tokens, 2, logits), expected)


def test_frequency_and_presence_count_the_output_alone() -> None:
    prompt, output, logits = [3, 9], [9, 14, 14, 50], random_logits(1)
    expected = logits.clone()
    for token, count in Counter(output).items():
        expected[0, token] -= 0.5 * count + 0.25
    sampling = RowSampling(frequency_penalty=0.5, presence_penalty=0.25)
    torch.testing.assert_close(adjusted(sampling, prompt + output, len(prompt), logits), expected)


def test_penalties_follow_the_tokens_that_are_sampled_later() -> None:
    sampling = RowSampling(presence_penalty=2.0, frequency_penalty=1.0)
    batch = make_batch({0: ([1], 1, sampling)})
    sampler, rows = Sampler(batch), np.array([0], np.int32)
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 8]] = torch.tensor([4.0, 3.5])
    chosen = []
    for _ in range(4):
        token = sampler.sample(logits.clone(), rows)
        batch.append(rows, token)
        chosen.append(int(token[0]))
    # 4.0; then 7 costs 3: 3.5 wins; then 7 stands at 1.0 and 8 at 0.5; then at 0.0 and 0.5.
    assert chosen == [7, 8, 7, 8]


def test_min_tokens_masks_stop_ids_until_so_many_are_known() -> None:
    sampling = RowSampling(min_tokens=2, stop_ids=(40, 41))
    batch = make_batch({0: ([1, 2], 2, sampling)})
    sampler, rows = Sampler(batch), np.array([0], np.int32)
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 41, 12]] = torch.tensor([9.0, 8.0, 1.0])
    chosen = []
    for _ in range(3):
        token = sampler.sample(logits.clone(), rows)
        batch.append(rows, token)
        chosen.append(int(token[0]))
    assert chosen == [12, 12, 40]


def test_bad_words_are_never_completed() -> None:
    sampling = RowSampling(bad_words=((30,), (9, 14, 20), (14, 21), (9, 22)))
    logits = random_logits(1)
    scores = adjusted(sampling, [9, 14, 9, 14], 2, logits)
    assert torch.isinf(scores[0]).nonzero().flatten().tolist() == [20, 21, 30]


def test_bad_words_and_min_tokens_and_bias_are_transformers() -> None:
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    words, bias, stops = [[30], [9, 14, 20], [14, 21], [9, 22], [14, 14]], {4: -1.5, 40: 3.0}, [40, 41]
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[one], value] for one, value in bias.items()]),
            NoBadWordsLogitsProcessor(words, eos_token_id=None),
            MinNewTokensLengthLogitsProcessor(1, 5, stops),
        ]
    )
    sampling = RowSampling(
        bad_words=tuple(map(tuple, words)), logit_bias=tuple(bias.items()), min_tokens=5, stop_ids=tuple(stops)
    )
    for seed, output in enumerate(([], [9], [9, 14], [3, 9, 14], [9, 14, 9, 14], [5, 9, 9, 14, 14])):
        tokens, logits = [1, *output], random_logits(1, seed=seed)
        expected = processors(torch.tensor([tokens]), logits.clone())
        torch.testing.assert_close(adjusted(sampling, tokens, 1, logits), expected)


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    scores = adjusted(RowSampling(bad_words=((9, 14, 20),)), [9, 14], 1, random_logits(1))
    assert not torch.isinf(scores).any()


def test_bias_and_allowed_ids() -> None:
    logits = random_logits(1)
    sampling = RowSampling(logit_bias=((4, -100.0), (5, 2.5)), allowed_token_ids=(4, 5, 6))
    scores = adjusted(sampling, [1], 1, logits)
    expected = torch.full_like(logits, -torch.inf)
    expected[0, 4:7] = logits[0, 4:7] + torch.tensor([-100.0, 2.5, 0.0])
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1), (20, 0.8, 0.05)])
def test_filters_keep_what_transformers_keep(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(1, seed=seed, vocab_size=3000)  # more than are sorted at first
    expected = logits.clone()
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        # Over all likelihoods, as ours: the likeliest is in every set.
        expected[0, torch.isinf(MinPLogitsWarper(min_p)(None, logits.clone())[0])] = -torch.inf
    ids = kept_ids(logits[0].numpy(), top_k, top_p, min_p)
    assert ids.tolist() == torch.isfinite(expected[0]).nonzero().flatten().tolist()


def test_a_flat_distribution_is_cut_where_top_p_is_reached() -> None:
    assert len(kept_ids(np.zeros(5000, np.float32), 0, 0.9, 0.0)) == 4500
    assert kept_ids(np.zeros(5000, np.float32), 0, 1e-9, 0.0).tolist() == [0]


def test_a_row_with_everything_masked_takes_the_lowest_id() -> None:
    sampling = RowSampling(temperature=1.0, top_p=0.5, allowed_token_ids=(40,), min_tokens=3, stop_ids=(40,))
    batch = make_batch({0: ([1], 1, sampling)})
    assert Sampler(batch).sample(random_logits(1), np.array([0], np.int32)).tolist() == [0]


MIXED = {
    0: RowSampling(temperature=1.0, seed=11),
    1: RowSampling(),
    2: RowSampling(temperature=0.7, seed=12, top_p=0.9),
    4: RowSampling(temperature=1.3, seed=13, top_k=7, min_p=0.02, logit_bias=((3, 4.0),)),
    5: RowSampling(temperature=1.0, seed=11, repetition_penalty=1.3),
    7: RowSampling(temperature=1.0, seed=14, presence_penalty=0.4, bad_words=((8,),)),
}


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
    batch = make_batch({row: ([1, 2, 8, row], 2, sampling) for row, sampling in MIXED.items()})
    sampler, rows = Sampler(batch), np.array(list(MIXED), np.int32)
    logits = random_logits(len(rows))
    together = sampler.sample(logits.clone(), rows)
    alone = [sampler.sample(logits[i : i + 1].clone(), rows[i : i + 1])[0] for i in range(len(rows))]
    assert together.tolist() == alone
    pairs = [sampler.sample(logits[i : i + 2].clone(), rows[i : i + 2]).tolist() for i in range(0, len(rows), 2)]
    assert together.tolist() == [one for pair in pairs for one in pair]


@pytest.mark.parametrize(
    "sampling",
    [
        RowSampling(temperature=0.8, seed=3),
        RowSampling(temperature=1.0, seed=4, top_k=6),
        RowSampling(temperature=1.2, seed=5, top_p=0.85),
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_draws_follow_the_softmax(sampling: RowSampling) -> None:
    """Chi-square of 20 000 draws at as many positions of one row, against the distribution in float64."""
    draws, vocab_size = 20_000, 12
    batch = make_batch({0: ([1], 1, sampling)}, vocab_size=vocab_size)
    sampler, rows = Sampler(batch), np.array([0], np.int32)
    logits = torch.linspace(-2, 2.5, vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))]
    counts = np.zeros(vocab_size)
    for position in range(draws):
        batch.num_tokens[0] = position  # the noise is a function of it; nothing else reads it here
        counts[sampler.sample(logits[None].clone(), rows)[0]] += 1
    weights = np.exp(logits.double().numpy() / sampling.temperature)
    order = np.argsort(-weights)
    keep = sampling.top_k or int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), sampling.top_p)) + 1
    weights[order[keep:]] = 0
    expected = weights / weights.sum() * draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    # 99.9 % of the distribution with 11 degrees of freedom lie below 31.3; seeds are fixed.
    assert chi_square < 31.3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "sampling", [RowSampling(), RowSampling(temperature=1.0), RowSampling(temperature=1.0, top_p=0.5)]
)
def test_logits_that_are_not_finite_are_an_error_and_no_token(bad: float, sampling: RowSampling) -> None:
    batch = make_batch({3: ([5, 6], 1, RowSampling()), 5: ([5, 6, 7], 1, sampling)})
    logits = random_logits(2)
    logits[1, 50] = bad
    with pytest.raises(NonFiniteLogits, match="not finite: row 5, position 3"):
        Sampler(batch).sample(logits, np.array([3, 5], np.int32))


def test_large_logits_whose_sum_overflows_are_sampled() -> None:
    batch = make_batch({3: ([5], 1, RowSampling())})
    logits = torch.full((1, VOCAB), 3e38)
    logits[0, 7] = 3.2e38
    assert Sampler(batch).sample(logits, np.array([3], np.int32)).tolist() == [7]


@pytest.mark.parametrize("penalty", [1e-38, 0.01, 10.0])
def test_penalties_never_make_scores_nan(penalty: float) -> None:
    sampling = RowSampling(
        temperature=1.0, repetition_penalty=penalty, frequency_penalty=-2.0, logit_bias=((5, 100.0),)
    )
    batch = make_batch({2: ([5, 6, 5, 9], 1, sampling)})
    logits = torch.full((1, VOCAB), 1e30)
    logits[0, [6, 9]] = torch.tensor([-3e38, 3e38])
    Sampler(batch).sample(logits, np.array([2], np.int32))
    assert not torch.isnan(logits).any()
    assert (logits[0] > -torch.inf).all()
    assert (logits[0] < torch.inf).all()
