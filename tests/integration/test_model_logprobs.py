"""Log-probabilities of a real model: against log_softmax of transformers on the same weights, in chunks or whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from service_chassis.protocol.logprobs import Logprobs
from support.runner_driver import RunnerDriver
from support.tiny_checkpoints import tiny_config, write_checkpoint
from worker_service.sampling.logprobs import PROMPT_SLICE
from worker_service.step_work import RAW_LOGITS, RowSampling

CHUNK = 45
PROMPT = [random.Random(3).randrange(211) for _ in range(3 * CHUNK + 1)]  # longer than two slices
K = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("LlamaForCausalLM", hidden_size=96, intermediate_size=208)
    return write_checkpoint(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Tensor:
    """The scores behind every token of the prompt, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    with torch.inference_mode():
        scores: Tensor = model(torch.tensor([PROMPT])).logits[0].float()
    return scores


class Told:
    """What a row was told of its prompt and of its first token."""

    def __init__(self) -> None:
        self.prompt = Logprobs(K + 1, num_unknown=1)
        self.sampled: Logprobs | None = None

    def take(self, driver: RunnerDriver, row: int) -> None:
        for told in driver.output.logprobs:
            if told.req_index != row:
                continue
            if told.prompt is not None:
                assert told.first_position == len(self.prompt), "nothing twice, nothing left out"
                self.prompt.extend(told.prompt)
            if told.sampled is not None:
                assert self.sampled is None
                self.sampled = told.sampled


def run(driver: RunnerDriver, row: int, *, chunk: int, mode: int = 0, crowd: int = 0, preempt_at: int = -1) -> Told:
    """Compute the prompt in chunks, among mates, perhaps preempted when so many tokens are computed."""
    rng = random.Random(5)
    sampling = RowSampling(num_logprobs=K, num_prompt_logprobs=K, logprobs_mode=mode)
    mates = {row + 1 + mate: [rng.randrange(211) for _ in range(30)] for mate in range(crowd)}
    new = [driver.enter(row, PROMPT, sampling)]
    # Some mates ask as well, for another number.
    new += [driver.enter(mate, tokens, RowSampling(num_logprobs=mate % 2 or None)) for mate, tokens in mates.items()]
    told = Told()
    while told.sampled is None:
        preempted = [row] if driver.rows[row].num_computed == preempt_at else []
        preempt_at = -1 if preempted else preempt_at
        scheduled = {}
        for one, state in driver.rows.items():
            missing = len(state.tokens) - (0 if one in preempted else state.num_computed)
            scheduled[one] = min(missing, chunk if one == row else 7)
        driver.step(scheduled, new=new, preempted=preempted)
        new = []
        told.take(driver, row)
    driver.step({}, finished=list(driver.rows))
    return told


def check(told: Told, reference: Tensor, *, normalize: bool = True) -> None:
    values = reference.double().log_softmax(dim=1) if normalize else reference.double()
    columns = told.prompt.part(0)
    assert told.sampled is not None
    columns.extend(told.sampled)
    assert len(columns) == len(PROMPT) + 1
    assert columns.ranks[0] == 0
    tokens = [*PROMPT[1:], int(reference[-1].argmax())]
    for place, token in enumerate(tokens):
        start = (place + 1) * (K + 1)
        ids = columns.token_ids[start : start + K + 1].tolist()
        assert ids[0] == token
        torch.testing.assert_close(
            torch.tensor(columns.values[start : start + K + 1]).double(), values[place][ids], rtol=1e-4, atol=1e-4
        )
        # The likeliest, but for what lies closer together than the two computations do.
        torch.testing.assert_close(values[place][ids[1:]], values[place].topk(K).values, rtol=1e-4, atol=1e-4)
        ahead = int((reference[place] > reference[place, token] + 1e-4).sum())
        behind = int((reference[place] > reference[place, token] - 1e-4).sum())
        assert ahead < columns.ranks[place + 1] <= max(behind, ahead + 1)


@pytest.mark.parametrize("mode", [0, RAW_LOGITS])
def test_prompt_and_token_are_told_as_transformers_score_them(directory: Path, reference: Tensor, mode: int) -> None:
    driver = RunnerDriver(directory)
    check(run(driver, 0, chunk=10_000, mode=mode), reference, normalize=mode != RAW_LOGITS)
    check(run(driver, 1, chunk=CHUNK, mode=mode, crowd=3), reference, normalize=mode != RAW_LOGITS)
    check(run(driver, 2, chunk=CHUNK, mode=mode, preempt_at=2 * CHUNK), reference, normalize=mode != RAW_LOGITS)


def test_what_is_told_has_the_same_bits_however_it_was_computed(directory: Path) -> None:
    """E5, under rule (b): chunked, in a crowd, preempted half-way through the prompt."""
    driver = RunnerDriver(directory, batch_invariant=True)
    whole = run(driver, 0, chunk=10_000)
    assert len(whole.prompt) == len(PROMPT)
    for got in (
        run(driver, 1, chunk=CHUNK),
        run(driver, 2, chunk=29, crowd=5),
        run(driver, 0, chunk=CHUNK, crowd=2, preempt_at=2 * CHUNK),
    ):
        assert got.prompt == whole.prompt
        assert got.sampled == whole.sampled


def test_scores_of_a_prompt_never_exist_all_at_once(directory: Path) -> None:
    driver = RunnerDriver(directory)
    model = driver.runner._model
    assert model is not None
    counts: list[int] = []
    compute = model.logits

    def count(hidden: Tensor) -> Tensor | None:
        counts.append(len(hidden))
        return compute(hidden)

    model.logits = count  # type: ignore[method-assign]
    run(driver, 0, chunk=10_000)
    assert counts == [PROMPT_SLICE, PROMPT_SLICE, len(PROMPT) - 1 - 2 * PROMPT_SLICE, 1]
    counts.clear()
    driver.generate(1, PROMPT, 3)  # who does not ask does not pay
    assert counts == [1, 1, 1]
