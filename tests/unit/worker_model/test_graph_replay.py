"""Steps replayed from recorded work give what the same steps give kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import support.triton_interpreter  # noqa: F401  # before the kernels
from maniple_kernels.backend import gpu_kernels_interpreted
from support.recorders import OpRecorder, RerunRecorder
from support.runner_driver import NUM_BLOCKS, RunnerDriver, single_thread
from support.tiny_checkpoints import tiny_config, write_checkpoint
from worker_service.forward.assemble import ForwardOptions
from worker_service.forward.recorder import Recorder

# Sizes that no kernel for the CPU takes: every operation is one of torch's, and can be recorded.
ALL_TORCH: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 72, "head_dim": 12}
PROMPTS = {0: [5, 99, 3, 17, 180, 2, 44], 1: [7] * 33, 2: [200, 1], 3: [9, 8, 7], 4: [31, 33]}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    single_thread()


def warmed_up(directory: Path, recorder: Recorder | None, backend: str, sizes: tuple[int, ...]) -> RunnerDriver:
    driver = RunnerDriver(directory, forward=ForwardOptions(attention_backend=backend, recorder=recorder))
    driver.runner.warm_up(sizes, False, lambda share, what: None)
    return driver


def serve(driver: RunnerDriver) -> list[dict[int, int]]:
    """Run rows that come and go: decodes of 1 to 5 rows, and prompts in between."""
    steps = [driver.step({0: 7}, new=[driver.enter(0, PROMPTS[0])])]
    steps += [driver.step({0: 1}) for _ in range(3)]
    steps.append(driver.step({0: 1, 1: 20}, new=[driver.enter(1, PROMPTS[1])]))
    steps.append(driver.step({0: 1, 1: 13, 2: 2}, new=[driver.enter(2, PROMPTS[2])]))
    steps += [driver.step({0: 1, 1: 1, 2: 1}) for _ in range(14)]  # over the border of a block
    steps.append(driver.step({1: 1, 2: 1}, finished=[0]))
    steps.append(driver.step({1: 1, 3: 3, 4: 2}, new=[driver.enter(3, PROMPTS[3]), driver.enter(4, PROMPTS[4])]))
    steps.append(driver.step({1: 1, 2: 1, 3: 1, 4: 1}))
    steps.append(driver.step({0: 7, 1: 1, 2: 1}, new=[driver.enter(0, PROMPTS[0])]))
    steps.append(driver.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1}))
    steps.append(driver.step({4: 1}))
    return steps


def caches(driver: RunnerDriver) -> list[torch.Tensor]:
    """Return what lies in the blocks, without the null block."""
    kv = driver.runner._kv
    assert kv is not None
    return [part[1:] for layer in kv.layers for part in layer]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def test_replayed_pieces_around_attention_give_the_same_tokens_and_caches(tmp_path: Path, architecture: str) -> None:
    window = {"sliding_window": 9} if architecture == "MistralForCausalLM" else {}
    directory = write_checkpoint(tmp_path, tiny_config(architecture, **ALL_TORCH, **window))
    plain = warmed_up(directory, None, "torch", ())
    expected = serve(plain)
    recorder = OpRecorder()
    recorded = warmed_up(directory, recorder, "torch", (4, 1, 2))
    assert serve(recorded) == expected
    for ours, theirs in zip(caches(recorded), caches(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for row, logits in plain.logits.items():
        torch.testing.assert_close(torch.stack(recorded.logits[row]), torch.stack(logits), rtol=1e-4, atol=1e-4)
    assert recorder.num_recorded == 3
    # Steps of single queries of at most 4 rows; five rows and everything with a prompt ran as they were.
    assert recorder.num_replayed == 20
    assert recorder.num_cuts == 3 * 3  # one for each layer of each recording


def test_padding_writes_to_the_null_block_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", **ALL_TORCH))
    driver = warmed_up(directory, OpRecorder(), "torch", (8,))
    driver.step({0: 7}, new=[driver.enter(0, PROMPTS[0])])
    before = [cache.clone() for cache in caches(driver)]
    driver.step({0: 1})
    batch = driver.runner._batch
    assert batch is not None
    block = int(batch.block_tables[0, 0]) - 1
    for was, now in zip(before, caches(driver), strict=True):
        changed = (was != now).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert changed == [block]


def test_graphs_go_with_the_cache_that_they_were_recorded_with(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", **ALL_TORCH))
    recorder = OpRecorder()
    driver = warmed_up(directory, recorder, "torch", (2,))
    driver.runner.allocate_kv_cache(NUM_BLOCKS)
    driver.step({0: 7}, new=[driver.enter(0, PROMPTS[0])])
    driver.step({0: 1})
    assert recorder.num_replayed == 0


def test_eager_is_enforced_by_recording_nothing(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", **ALL_TORCH))
    recorder = OpRecorder()
    driver = RunnerDriver(directory, forward=ForwardOptions(attention_backend="torch", recorder=recorder))
    assert driver.runner.warm_up((4,), True, lambda share, what: None) == 0
    driver.step({0: 7}, new=[driver.enter(0, PROMPTS[0])])
    driver.step({0: 1})
    assert recorder.num_recorded == recorder.num_replayed == 0


def test_progress_names_every_graph(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", **ALL_TORCH))
    driver = RunnerDriver(directory, forward=ForwardOptions(attention_backend="torch", recorder=OpRecorder()))
    told: list[tuple[float, str]] = []
    driver.runner.warm_up((1, 4), False, lambda share, what: told.append((share, what)))
    assert told == [(0.0, "graph of 4 rows, 1 of 2"), (0.5, "graph of 1 rows, 2 of 2")]


def test_whole_model_by_interpreted_kernels_replays_with_padding(tmp_path: Path) -> None:
    """One layer of the smallest sizes: the interpreter takes milliseconds for each program."""
    config = tiny_config(
        "Qwen3ForCausalLM",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    directory = write_checkpoint(tmp_path, config)
    steps: list[dict[int, int]] = [{0: 5}, {0: 1, 1: 2}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1}]
    prompts = {0: [5, 9, 3, 17, 60], 1: [2, 33]}

    def run(driver: RunnerDriver) -> list[dict[int, int]]:
        entering = [[driver.enter(0, prompts[0])], [driver.enter(1, prompts[1])], [], [], []]
        return [driver.step(scheduled, new=new) for scheduled, new in zip(steps, entering, strict=True)]

    plain = warmed_up(directory, None, "cpu", ())
    expected = run(plain)
    recorder = RerunRecorder()
    with gpu_kernels_interpreted(), np.errstate(all="ignore"):
        recorded = warmed_up(directory, recorder, "triton", (3,))
        assert run(recorded) == expected
    assert recorder.num_replayed == 3
    for row, logits in plain.logits.items():
        torch.testing.assert_close(torch.stack(recorded.logits[row]), torch.stack(logits), rtol=1e-4, atol=1e-4)
