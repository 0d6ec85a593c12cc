"""The last layer computes the tokens that are looked at; what a step says is the same to the bit as if it did all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maniple_kernels.linear import PANEL, fits_panels
from support.runner_driver import RunnerDriver, single_thread
from support.tiny_checkpoints import tiny_config, write_checkpoint
from worker_service.forward.step_outputs import StepOutputs
from worker_service.models.llama import LlamaModel
from worker_service.step_work import Mode, Pooling, RowSampling, Speculation, StepOutput, StepWork

LONG, SHORT = [*range(3, 43)], [9, 8, 7]
Said = list[tuple[dict[int, int], StepOutput]]


@pytest.fixture(autouse=True)
def _setting() -> None:
    single_thread()
    if not fits_panels(torch.empty(PANEL, 2)):
        pytest.skip("this CPU multiplies no panels")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One that the kernel of whole layers takes."""
    write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", hidden_size=64, intermediate_size=96))
    return tmp_path


def plain(driver: RunnerDriver) -> Said:
    """A prompt in two pieces, beside one that begins to decode."""
    new = [driver.enter(0, LONG), driver.enter(1, SHORT)]
    said = [(driver.step({0: 25, 1: 3}, new=new), driver.output), (driver.step({0: 15, 1: 1}), driver.output)]
    return [*said, (driver.step({0: 1, 1: 1}), driver.output)]


def asking_for_its_prompt(driver: RunnerDriver) -> Said:
    new = [driver.enter(0, LONG), driver.enter(1, LONG[::-1], RowSampling(num_prompt_logprobs=2))]
    return [(driver.step({0: 25, 1: 20}, new=new), driver.output), (driver.step({0: 15, 1: 20}), driver.output)]


def pooling(driver: RunnerDriver) -> Said:
    new = [driver.enter(0, LONG), driver.enter(1, LONG[::-1], pooling=Pooling(is_mean=True, normalize=False))]
    said = [(driver.step({0: 25, 1: 20}, new=new), driver.output)]
    return [*said, (driver.step({0: 15, 1: 20}, pooled=[1]), driver.output)]


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [(plain, [[27], [14, 15], None]), (asking_for_its_prompt, [None, None]), (pooling, [None, None])],
)
def test_what_steps_say_is_what_they_say_when_all_tokens_are_wanted(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: Callable[[RunnerDriver], Said],
    wanted: list[list[int] | None],
) -> None:
    asked: list[list[int] | None] = []
    choose = StepOutputs.wanted

    def noting(self: StepOutputs, work: StepWork) -> Any:
        places = choose(self, work)
        asked.append(None if places is None else places.tolist())
        return places

    monkeypatch.setattr(StepOutputs, "wanted", noting)
    some = RunnerDriver(checkpoint)
    assert isinstance(some.runner._model, LlamaModel)
    assert some.runner._model._fused is not None
    said = steps(some)
    assert asked == wanted
    monkeypatch.setattr(StepOutputs, "wanted", lambda self, work: None)
    every = RunnerDriver(checkpoint)
    for (tokens, output), (expected, whole) in zip(said, steps(every), strict=True):
        assert tokens == expected
        assert output.logprobs == whole.logprobs
        assert [vector.tolist() for vector in output.vectors] == [vector.tolist() for vector in whole.vectors]
    for row, scores in every.logits.items():
        assert torch.equal(torch.stack(some.logits[row]), torch.stack(scores))


def test_all_tokens_are_wanted_where_rows_try_tokens_ahead(checkpoint: Path) -> None:
    outputs = RunnerDriver(checkpoint).runner._outputs
    assert outputs is not None
    work = StepWork(
        step=1,
        mode=Mode.RUN,
        rows=np.array([0], np.int32),
        num_computed_tokens=np.array([5], np.int32),
        num_scheduled_tokens=np.array([3], np.int32),
        samples=np.array([True]),
    )
    places = outputs.wanted(work)
    assert places is not None
    assert places.tolist() == [2]
    tries = Speculation(rows=(0,), settled=(), prompt_lookup_min=1, prompt_lookup_max=2)
    assert outputs.wanted(replace(work, speculation=tries)) is None
