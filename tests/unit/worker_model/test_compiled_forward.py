"""A compiled forward computes what the plain one does, alone and in recordings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from service_chassis.errors import InvalidParameter
from support.recorders import RerunRecorder
from support.runner_driver import RunnerDriver, single_thread
from support.tiny_checkpoints import tiny_config, write_checkpoint
from worker_service.forward.assemble import ForwardOptions
from worker_service.forward.compile_rule import compile_rule
from worker_service.forward.compiled_forward import keep_compiled_code
from worker_service.models import layers

PROMPT = [5, 99, 3, 17, 180, 2, 44]
# Traced and differentiated from, but run by torch itself: no compiler is needed on the machine.
TRACED = "aot_eager"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    single_thread()
    monkeypatch.setattr(layers, "_can_pack", lambda dtype: False)  # torch cannot trace oneDNN's own layout
    config = tiny_config("Qwen3ForCausalLM", hidden_size=40, intermediate_size=72, head_dim=12, num_hidden_layers=2)
    return write_checkpoint(tmp_path, config)


def test_compiled_forward_serves_the_same_tokens_with_two_graphs(directory: Path) -> None:
    plain = RunnerDriver(directory, forward=ForwardOptions(attention_backend="torch"))
    expected = plain.generate(0, PROMPT, 6, chunk=3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = RunnerDriver(directory, forward=ForwardOptions(attention_backend="torch", compiler=TRACED))
    assert compiled.generate(0, PROMPT, 6, chunk=3) == expected
    for ours, theirs in zip(compiled.logits[0], plain.logits[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    compiled.generate(1, PROMPT * 3, 2, chunk=11)
    # One for a single token, one for any number of them: nothing is compiled anew while it serves.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_compiled_forward_is_recorded_around_attention(directory: Path) -> None:
    expected = RunnerDriver(directory, forward=ForwardOptions(attention_backend="torch")).generate(0, PROMPT, 6)
    recorder = RerunRecorder()  # what records operations of torch would have them not compiled
    options = ForwardOptions(attention_backend="torch", compiler=TRACED, recorder=recorder)
    driver = RunnerDriver(directory, forward=options)
    driver.runner.warm_up((2, 1), False, lambda share, what: None)
    assert driver.generate(0, PROMPT, 6) == expected
    assert recorder.num_replayed == 5
    assert recorder.num_cuts == 2 * (2 + 5)  # two layers; two recordings and five replays


def test_compiled_code_is_kept_in_our_cache_unless_the_environment_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANIPLE_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


@pytest.mark.parametrize(
    ("compiler", "device", "world_size", "told"),
    [
        ("", "cpu", 2, ""),
        ("inductor", "cuda:0", 1, ""),
        ("inductor", "cpu", 1, "needs a GPU"),
        ("inductor", "cuda:0", 2, "holds on one rank, not on 2"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    compiler: str, device: str, world_size: int, told: str
) -> None:
    rule = compile_rule(compiler, torch.device(device), world_size)
    assert rule.startswith(told)
    assert bool(rule) == bool(told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (ForwardOptions(compiler="inductor"), "torch_compile=True: needs a GPU"),
        (ForwardOptions(tune_kernels=True), "tune_kernels=True: needs a GPU"),
    ],
)
def test_a_worker_on_a_cpu_refuses_what_needs_a_gpu(tmp_path: Path, options: ForwardOptions, told: str) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"))
    with pytest.raises(InvalidParameter, match=told):
        RunnerDriver(directory, forward=options)
