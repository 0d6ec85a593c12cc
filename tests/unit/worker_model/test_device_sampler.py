"""The sampler of kernels beside the host's: same scores to the bit, same ids, through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import support.triton_interpreter  # noqa: F401  # before the kernels
from worker_service.input_batch import InputBatch
from worker_service.sampling.device_sampler import DeviceSampler
from worker_service.sampling.logprobs import OutputLogprobs
from worker_service.sampling.sampler import NonFiniteLogits, Sampler
from worker_service.step_work import FinishedRow, Mode, NewRow, RowSampling, StepWork

VOCAB = 211
CPU = torch.device("cpu")
SAMPLINGS = {
    0: RowSampling(),
    1: RowSampling(temperature=0.8, seed=3),
    2: RowSampling(temperature=1.3, top_k=9, seed=4, repetition_penalty=1.4),
    3: RowSampling(temperature=0.7, top_p=0.8, seed=5, presence_penalty=0.7, frequency_penalty=0.3),
    4: RowSampling(temperature=1.0, min_p=0.1, seed=6, logit_bias=((5, 2.5), (77, -3.0))),
    5: RowSampling(allowed_token_ids=(3, 8, 20, 33, 210), bad_words=((33,), (8, 20))),
    6: RowSampling(temperature=2.0, seed=7, min_tokens=3, stop_ids=(11, 12), repetition_penalty=0.6),
    7: RowSampling(frequency_penalty=-1.0, num_logprobs=2),
    8: RowSampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02, seed=8, num_logprobs=1, logprobs_mode=3),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):  # the interpreter computes masked lanes too
        yield


def entering(rows: dict[int, RowSampling]) -> tuple[NewRow, ...]:
    prompts = np.random.default_rng(1).integers(0, VOCAB, (16, 5)).astype(np.int32)
    return tuple(
        NewRow(
            req_index=row,
            row_key=row,
            request_id=f"r{row}",
            sample_index=0,
            token_ids=prompts[row],
            num_prompt_tokens=4,
            num_computed_tokens=0,
            num_prefill_tokens=5,
            sampling=sampling,
        )
        for row, sampling in rows.items()
    )


def make_batch(rows: dict[int, RowSampling]) -> InputBatch:
    batch = InputBatch(max_num_seqs=16, max_model_len=64, max_num_batched_tokens=64, block_size=16, vocab_size=VOCAB)
    batch.apply(StepWork(step=1, mode=Mode.APPLY_ONLY, new_rows=entering(rows)))
    return batch


def logits_of(num_rows: int, seed: int) -> Tensor:
    logits = torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, ::9] = logits[:, :1]  # ties
    return logits


def test_every_kind_of_row_samples_what_the_host_samples() -> None:
    hosts, ours = make_batch(SAMPLINGS), make_batch(SAMPLINGS)
    host, device = Sampler(hosts), DeviceSampler(ours, CPU)
    rows = np.array(sorted(SAMPLINGS), np.int32)
    for step in range(6):
        # Rows are masked by a grammar now and then, and not all sample in every step.
        mask = np.packbits(np.random.default_rng(step).random(VOCAB) < 0.3, bitorder="little")
        some = rows if step % 3 else rows[step // 3 :: 2]
        for batch in (hosts, ours):
            batch.sampling.masks = {1: mask, 3: mask} if step % 2 else {}
        expected_scores = logits_of(len(some), step)
        scores = expected_scores.clone()
        expected_noted, noted = (OutputLogprobs(batch.sampling.logprobs, some) for batch in (hosts, ours))
        expected = host.sample(expected_scores, some, expected_noted)
        sampled = device.sample(scores, some, noted)
        assert sampled.tolist() == expected.tolist()
        # What the device leaves is what the host had before it divided by temperature.
        for place, row in enumerate(some.tolist()):
            if SAMPLINGS[row].temperature == 0:
                assert torch.equal(scores[place], expected_scores[place])
        for mode, kept in expected_noted._noted.items():
            assert torch.equal(noted._noted[mode], kept)
        assert device.latest[torch.from_numpy(some).long()].tolist() == expected.tolist()
        for batch in (hosts, ours):
            batch.append(some, expected)


def test_penalties_follow_rows_that_come_and_go() -> None:
    penalized = RowSampling(presence_penalty=1.5, repetition_penalty=1.2)
    hosts, ours = make_batch({0: penalized, 3: penalized}), make_batch({0: penalized, 3: penalized})
    host, device = Sampler(hosts), DeviceSampler(ours, CPU)
    for step in range(9):
        if step == 3:  # another row in the same place; and more than there was room for at first
            work = StepWork(
                step=step,
                mode=Mode.APPLY_ONLY,
                finished=(FinishedRow(0, 1, 5),),
                new_rows=entering(dict.fromkeys((0, 5, 6, 7, 8), penalized)),
            )
            hosts.apply(work)
            ours.apply(work)
        rows = np.array(sorted(ours.live), np.int32)
        logits = logits_of(len(rows), 100 + step)
        expected = host.sample(logits.clone(), rows)
        assert device.sample(logits, rows).tolist() == expected.tolist()
        # In step 6 somebody else says what followed: two tokens for one row, and none for another.
        kept = rows if step != 6 else rows[rows != 3]
        for batch in (hosts, ours):
            batch.append(kept, expected[np.isin(rows, kept)])
            if step == 6:
                batch.append(np.array([5], np.int32), np.array([17], np.int32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_named_as_on_the_host(bad: float) -> None:
    batch = make_batch({2: RowSampling(), 5: RowSampling(temperature=1.0)})
    rows = np.array([2, 5], np.int32)
    logits = logits_of(2, 0)
    logits[1, 100] = bad
    with pytest.raises(NonFiniteLogits) as expected:
        Sampler(batch).sample(logits.clone(), rows)
    launched = DeviceSampler(batch, CPU).launch(logits, rows)
    with pytest.raises(NonFiniteLogits) as refused:
        launched.take()
    assert str(refused.value) == str(expected.value) == "the model's logits are not finite: row 5, position 5"


def test_large_finite_logits_are_no_fault() -> None:
    batch = make_batch({2: RowSampling()})
    logits = torch.full((1, VOCAB), 3.0e38)  # their sum is not finite
    assert DeviceSampler(batch, CPU).sample(logits, np.array([2], np.int32)).tolist() == [0]


def test_warming_up_leaves_no_trace() -> None:
    penalized = RowSampling(presence_penalty=1.5, repetition_penalty=1.2, temperature=0.9, seed=2)
    warm, cold = make_batch({0: penalized, 3: RowSampling()}), make_batch({0: penalized, 3: RowSampling()})
    host, device = Sampler(cold), DeviceSampler(warm, CPU)
    device.warm_up(torch.zeros(64, VOCAB))
    assert device.latest.tolist() == [0] * 16
    rows = np.array([0, 3], np.int32)
    for step in range(3):
        logits = logits_of(2, step)
        expected = host.sample(logits.clone(), rows)
        assert device.sample(logits, rows).tolist() == expected.tolist()
        for batch in (warm, cold):
            batch.append(rows, expected)
