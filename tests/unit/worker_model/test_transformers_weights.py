"""Weights and hidden states of models that transformers computes: sleep, other weights, embeddings, memory."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service_chassis.errors import InvalidParameter
from support.runner_driver import RunnerDriver, single_thread
from support.tiny_families import greedy, write_family
from worker_service.models.transformers_model import TransformersModel
from worker_service.sleep.choose import SleepOptions
from worker_service.sleep.renewal import InPlace
from worker_service.sleep.tensors import memory_of, tensors_in

PROMPT = [5, 80, 41, 3, 9, 77, 60, 11, 2, 31]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    single_thread()


def ignore(share: float, what: str) -> None:
    pass


def model_of(driver: RunnerDriver) -> Any:
    model = driver.runner._model
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("level", [1, 2])
def test_says_the_same_after_a_sleep(level: int, tmp_path: Path) -> None:
    model = write_family(tmp_path, "gemma2")
    driver = RunnerDriver(tmp_path, sleep=SleepOptions("auto", ""))
    expected = greedy(model, PROMPT, 5)
    assert driver.generate(0, PROMPT, 5) == expected
    weights = tensors_in(model_of(driver))
    assert driver.runner.sleep(level) > 0
    # Of what takes more than two pages the middle is away.
    middles = [one.flatten()[one.numel() // 2 - 64 :][:128] for one in weights if one.nbytes >= 3 * mmap.PAGESIZE]
    assert middles
    assert not any(bool(one.any()) for one in middles)
    driver.runner.wake_up(["weights", "kv_cache"], ignore)
    driver.step({}, finished=[0])
    assert driver.generate(1, PROMPT, 5) == expected


def test_takes_other_weights_and_refuses_those_of_another_model(tmp_path: Path) -> None:
    first = write_family(tmp_path / "one", "mixtral", seed=1)
    second = write_family(tmp_path / "two", "mixtral", seed=2)
    write_family(tmp_path / "other", "mixtral", rope_theta=5.0)
    driver = RunnerDriver(tmp_path / "one")
    assert driver.generate(0, PROMPT, 5) == greedy(first, PROMPT, 5)
    with pytest.raises(InvalidParameter, match=r"must have the config.json of the model that is served; fields"):
        driver.runner.stage_weights(str(tmp_path / "other"), ignore)
    driver.runner.stage_weights(str(tmp_path / "two"), ignore)
    driver.runner.put_staged_weights()
    assert driver.generate(1, PROMPT, 5) == greedy(second, PROMPT, 5)


def test_weights_are_replaced_where_addresses_must_stay(tmp_path: Path) -> None:
    write_family(tmp_path / "one", "mixtral", seed=1)
    second = write_family(tmp_path / "two", "mixtral", seed=2)
    driver = RunnerDriver(tmp_path / "one")
    model = model_of(driver)
    addresses = {name: slot.target.data_ptr() for name, slot in model.slots().items()}
    InPlace().stage(str(tmp_path / "two"), model, ignore)()
    assert {name: slot.target.data_ptr() for name, slot in model.slots().items()} == addresses
    assert driver.generate(0, PROMPT, 5) == greedy(second, PROMPT, 5)
    kept = {memory_of(one) for one in InPlace().without_source(model)}
    filled = {memory_of(slot.target) for slot in model.slots().values()}
    assert {memory_of(one) for one in tensors_in(model)} == kept | filled
    assert not kept & filled


@pytest.mark.parametrize("kind", ["opt", "gemma2"])
def test_embeddings_are_what_the_scores_are_made_of(kind: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, kind)
    driver = RunnerDriver(tmp_path)
    seen: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(torch.tensor([PROMPT]))
    served = model_of(driver)
    with torch.inference_mode():
        hidden = _hidden(driver, served)
    assert driver.facts.hidden_size == hidden.shape[1]
    np.testing.assert_allclose(served.final_hidden(hidden).numpy(), seen[0][0].numpy(), rtol=1e-3, atol=1e-4)


def _hidden(driver: RunnerDriver, model: TransformersModel) -> torch.Tensor:
    found: list[torch.Tensor] = []
    compute = model.forward

    def remember(*arguments: Any) -> torch.Tensor:
        found.append(compute(*arguments))
        return found[-1]

    forward = driver.runner._forward
    assert forward is not None
    forward._forward = remember
    driver.generate(1, PROMPT, 1)
    return found[0]


def test_weights_lie_in_memory_once(tmp_path: Path) -> None:
    """Tied weights are one tensor, and nothing of the file stays mapped."""
    write_family(tmp_path, "gemma2", vocab_size=4096)
    model = model_of(RunnerDriver(tmp_path))
    tied = json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert tied
    assert model.weight_bytes < (tmp_path / "model.safetensors").stat().st_size + (1 << 16)
    assert str(tmp_path) not in Path(f"/proc/{os.getpid()}/maps").read_text()
