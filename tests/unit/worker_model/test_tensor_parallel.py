"""Ranks as threads: what they compute together is what one rank computes, and each holds its part."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service_chassis.errors import InvalidParameter
from service_chassis.protocol.logprobs import Logprobs
from support.runner_driver import RunnerDriver
from support.thread_ranks import run_ranks
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from worker_service.models import checkpoint as checkpoint_module
from worker_service.models.registry import load_model
from worker_service.platforms.base import MemoryReading
from worker_service.platforms.cpu import CpuPlatform
from worker_service.process_group import LoneProcessGroup
from worker_service.runner import LoadOptions
from worker_service.socket_group import SocketProcessGroup
from worker_service.step_work import RowSampling
from worker_service.tensor_group import TensorGroup

SPLITS_BY_4 = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    # KV heads split by 2 and by 4; a vocabulary of 512.
    "llama": tiny_config("LlamaForCausalLM", vocab_size=512, **SPLITS_BY_4),
    # More ranks than KV heads; biases; the embedding is also the head; a vocabulary that no size divides.
    "qwen2-tied": tiny_config(
        "Qwen2ForCausalLM", vocab_size=509, tie_word_embeddings=True, **{**SPLITS_BY_4, "num_key_value_heads": 2}
    ),
    # Biases behind the split inputs too, which must be added once; one KV head for all.
    "llama-biases": tiny_config(
        "LlamaForCausalLM", attention_bias=True, mlp_bias=True, **{**SPLITS_BY_4, "num_key_value_heads": 1}
    ),
    # 6 query and 3 KV heads, norms of each head; three ranks.
    "qwen3": tiny_config("Qwen3ForCausalLM", intermediate_size=96),
}
PROMPTS = [[5, 99, 3, 17, 180, 2, 44], [7] * 33, [200, 1]]


@dataclass(frozen=True)
class Case:
    name: str
    directory: Path

    @property
    def config(self) -> dict[str, Any]:
        return CONFIGS[self.name]

    @property
    def sizes(self) -> tuple[int, ...]:
        return (3,) if self.name == "qwen3" else (2, 4)


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    return Case(request.param, write_checkpoint(directory, CONFIGS[request.param], num_files=2))


def drive(directory: Path, group: SocketProcessGroup | None = None, **options: Any) -> RunnerDriver:
    """Run three rows, greedy and seeded, whole and in chunks, mixed with decodes; keep tokens and logits."""
    driver = RunnerDriver(directory, group=group, **options)
    sampling = [RowSampling(), RowSampling(temperature=1.0, seed=7, top_p=0.9), RowSampling()]
    news = [driver.enter(row, prompt, sampling[row]) for row, prompt in enumerate(PROMPTS)]
    driver.step({0: 7, 1: 16}, new=news[:2])
    driver.step({0: 1, 1: 17, 2: 2}, new=news[2:])
    for _ in range(6):
        driver.step({0: 1, 1: 1, 2: 1})
    return driver


def tokens_of(driver: RunnerDriver) -> list[list[int]]:
    batch = driver.runner._batch
    assert batch is not None
    return [batch.known_tokens(row) for row in range(len(PROMPTS))]


def test_ranks_compute_what_one_rank_computes(case: Case) -> None:
    alone = drive(case.directory)
    for world_size in case.sizes:
        drivers = run_ranks(world_size, lambda group: drive(case.directory, group))
        for driver in drivers:
            assert tokens_of(driver) == tokens_of(alone)  # no near tie in these weights
        assert [bool(driver.logits) for driver in drivers] == [True] + [False] * (world_size - 1)
        for row, scores in alone.logits.items():
            for want, got in zip(scores, drivers[0].logits[row], strict=True):
                assert got.shape == want.shape
                assert float((got - want).abs().max()) < 2e-4


def test_bfloat16_ranks_stay_near_one_rank(case: Case) -> None:
    world_size = case.sizes[-1]
    alone = drive(case.directory, dtype="bfloat16")
    first = run_ranks(world_size, lambda group: drive(case.directory, group, dtype="bfloat16"))[0]
    for row in alone.logits:  # the first scores of each row follow from the same tokens
        want, got = alone.logits[row][0], first.logits[row][0]
        assert float((got - want).norm() / want.norm()) < 0.03


def test_ranks_hold_their_parts_and_read_nothing_else(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read["bytes"] += count
        return count

    monkeypatch.setattr(checkpoint_module.os, "preadv", counting)
    config = case.config
    tensors = tiny_tensors(config)
    for world_size in case.sizes:
        for rank in range(world_size):
            read.clear()
            model, _, _ = load_model(
                LoadOptions(model=str(case.directory)), CpuPlatform(1), rank, world_size, lambda share, what: None
            )
            expected = sum(share_of(name, tensor, rank, world_size, config) for name, tensor in tensors.items()) * 4
            assert read["bytes"] == expected
            # The head is kept twice: packed to multiply, and plain to look up (tied) or for exact scores.
            head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
            twice = share_of("lm_head.weight", head, rank, world_size, config) * 4
            assert expected <= model.weight_bytes <= 1.05 * (expected + twice)


def share_of(name: str, tensor: torch.Tensor, rank: int, world_size: int, config: dict[str, Any]) -> int:
    """Elements of a tensor that a rank keeps, by what it is."""
    if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
        return tensor.numel()
    if name.startswith(("model.embed_tokens", "lm_head")):
        size = len(tensor)
        return (size * (rank + 1) // world_size - size * rank // world_size) * tensor.shape[1]
    if "k_proj" in name or "v_proj" in name:
        return tensor.numel() // min(world_size, config["num_key_value_heads"])
    return tensor.numel() // world_size


def test_kv_blocks_are_a_rank_s_part(case: Case) -> None:
    config = case.config
    whole = drive(case.directory).facts.block_bytes
    world_size = case.sizes[-1]
    facts = [driver.facts for driver in run_ranks(world_size, lambda group: drive(case.directory, group))]
    for fact in facts:
        assert fact.block_bytes * min(world_size, config["num_key_value_heads"]) == whole
        assert fact.vocab_size == config["vocab_size"]


def test_runner_joins_a_second_formation_with_the_weights_it_has(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, CONFIGS["llama"])
    drivers = run_ranks(2, lambda group: drive(directory, group), formation_id="first")
    want = tokens_of(drivers[0])

    def again(group: SocketProcessGroup) -> list[list[int]]:
        driver = drivers[group.rank]
        driver.runner.join(group)
        driver.runner.reset()
        driver.rows.clear()
        for row, prompt in enumerate(PROMPTS):
            driver.generate(row, prompt, 3)
        return tokens_of(driver)

    for tokens in run_ranks(2, again, formation_id="second"):
        # Row 1 samples with a seed in the first run and is greedy here.
        assert [tokens[row] for row in (0, 2)] == [want[row][: len(PROMPTS[row]) + 3] for row in (0, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [37, 600_000], ids=["over-sockets", "over-gloo"])
def test_sums_are_the_same_on_every_rank(size: int, dtype: torch.dtype) -> None:
    def body(group: SocketProcessGroup) -> torch.Tensor:
        tensors = TensorGroup(torch.device("cpu"))
        tensors.join(group)
        x = torch.arange(size, dtype=torch.float32).remainder_(17).mul_(group.rank + 1).to(dtype)
        return tensors.all_reduce(x).clone()

    sums = run_ranks(3, body)
    want = torch.arange(size, dtype=torch.float32).remainder_(17).mul_(6)  # small whole numbers: exact in any type
    for got in sums:
        assert torch.equal(got.float(), want)


def test_one_rank_needs_no_exchange() -> None:
    tensors = TensorGroup(torch.device("cpu"))
    tensors.join(LoneProcessGroup("alone"))
    x = torch.ones(3)
    assert tensors.all_reduce(x) is x
    gathered = tensors.gather(x)
    assert gathered is not None
    assert gathered[0] is x


def test_tokens_of_other_ranks_are_not_trusted(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, CONFIGS["llama"])

    def body(group: SocketProcessGroup) -> list[int]:
        driver = RunnerDriver(directory, group=group)
        if group.rank == 1:  # what it would sample is wrong, and nobody may notice
            outputs = driver.runner._outputs
            assert outputs is not None
            outputs.sampler.sample = lambda logits, rows, noting: np.full(len(rows), 3, np.int32)  # type: ignore[method-assign]
        return driver.generate(0, PROMPTS[0], 5)

    alone = RunnerDriver(directory).generate(0, PROMPTS[0], 5)
    assert run_ranks(2, body) == [alone, alone]


def test_every_rank_knows_what_rank_0_tells_of_tokens(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, CONFIGS["llama"])
    sampling = RowSampling(num_logprobs=2, num_prompt_logprobs=1)

    def told(group: SocketProcessGroup | None = None) -> list[Logprobs | None]:
        driver, prompt = RunnerDriver(directory, group=group), PROMPTS[1]
        driver.step({0: 7}, new=[driver.enter(0, prompt, sampling)])  # a step that samples nothing
        found = [one.prompt for one in driver.output.logprobs]
        for count in (len(prompt) - 7, 1, 1):
            driver.step({0: count})
            found += [columns for one in driver.output.logprobs for columns in (one.prompt, one.sampled)]
        return found

    alone = told()
    ranks = run_ranks(2, told)
    assert ranks[0] == ranks[1]
    assert [columns and len(columns) for columns in alone] == [7, len(PROMPTS[1]) - 8, 1, None, 1, None, 1]
    for got, want in zip(ranks[0], alone, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.token_ids == want.token_ids
            assert max(abs(one - other) for one, other in zip(got.values, want.values, strict=True)) < 2e-4


@pytest.mark.parametrize(
    ("world_size", "rule"),
    [
        (2, "must divide the model's num_kv_heads"),
        (4, "must divide the model's num_attention_heads"),
    ],
)
def test_split_that_cannot_work_is_refused_with_those_that_would(tmp_path: Path, world_size: int, rule: str) -> None:
    write_checkpoint(tmp_path, CONFIGS["qwen3"])
    with pytest.raises(InvalidParameter) as caught:
        load_model(LoadOptions(model=str(tmp_path)), CpuPlatform(1), 0, world_size, lambda share, what: None)
    assert caught.value.field == "tensor_parallel_size"
    assert rule in caught.value.rule
    assert "over 1, 3 or 6 ranks" in caught.value.rule


def test_batch_invariance_is_refused_on_several_ranks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["llama"])
    options = LoadOptions(model=str(tmp_path), batch_invariant=True)
    with pytest.raises(InvalidParameter, match="batch_invariant=True: holds on one rank, not on 2"):
        load_model(options, CpuPlatform(1), 0, 2, lambda share, what: None)


def test_ranks_on_one_machine_share_its_cores_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    reading = MemoryReading(total=4000, available=3000, own=0)
    budgets = []
    for num_threads, sharing in ((0, 1), (0, 3), (0, 9), (2, 3)):
        platform = CpuPlatform(num_threads)
        platform.share(sharing)
        platform.bind()
        budgets.append(platform.kv_budget(reading, 200, 0.9, 10**9))
    assert chosen == [7, 2, 1, 2]
    assert budgets == [1400, 466, 155, 466]  # half of the 2800 that are free, and of that a share
