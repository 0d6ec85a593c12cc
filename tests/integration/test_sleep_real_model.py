"""A real model on two ranks: memory that goes and comes back, the same tokens after it, other weights in its place."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from control_plane.fleet import Fleet
from control_plane.generation_stream import GenerationStream
from control_plane.pause import PauseMode
from service_chassis.errors import InvalidParameter, WrongState
from service_chassis.sleep_tags import KV_CACHE, WEIGHTS
from support.engine_harness import Collected, collect, generation
from support.fleet_harness import running_fleet
from support.greedy_rule import assert_greedy
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from support.waiting import until

WORLD_SIZE = 2
BLOCK_SIZE = 16
NUM_BLOCKS = 40
CONFIG = tiny_config(
    "LlamaForCausalLM",
    vocab_size=6000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=2048,
)
# Layers x keys and values x heads x size x float32, shared by the ranks.
KV_BYTES = NUM_BLOCKS * BLOCK_SIZE * 3 * 2 * 8 * 64 * 4 // WORLD_SIZE
PROMPT = [(7 * place) % 5990 for place in range((NUM_BLOCKS - 8) * BLOCK_SIZE)]  # fills nearly all blocks
SHORT = [3, 1, 4, 1, 5, 9, 2, 6]


def write_model(directory: Path, *, seed: int, config: dict[str, Any] = CONFIG, **changed: Any) -> Path:
    """Write a checkpoint; ``changed`` tensors take the place of its own, None leaves one out."""
    tensors = {name: tensor * 0.25 for name, tensor in tiny_tensors(config, seed=seed).items()} | changed
    write_checkpoint(directory, config, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    vocab = {f"t{index}": index for index in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


def of_transformers(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


def weight_bytes() -> int:
    """What one rank holds of the checkpoint, but for norms, which every rank has."""
    return sum(tensor.numel() for tensor in tiny_tensors(CONFIG).values()) * 4 // WORLD_SIZE


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


class Numbers:
    """Fresh request ids."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.count = 0

    async def begin(self, prompt: Sequence[int], max_tokens: int = 8) -> GenerationStream:
        self.count += 1
        return await self.fleet.generate(generation(f"r{self.count}", prompt, max_tokens=max_tokens))

    async def ask(self, prompt: Sequence[int], max_tokens: int = 8) -> Collected:
        return await collect(await self.begin(prompt, max_tokens))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    write_model(directory / "first", seed=1)
    write_model(directory / "second", seed=2)
    return directory


def two_ranks(model: Path, **config: Any) -> Any:
    return running_fleet(
        str(model),
        executor="mp",
        tensor_parallel_size=WORLD_SIZE,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_BLOCKS,
        max_num_batched_tokens=256,
        enable_sleep_mode=True,
        **config,
    )


async def test_memory_goes_and_comes_back_and_tokens_stay(checkpoints: Path) -> None:
    async with two_ranks(checkpoints / "first") as running, asyncio.timeout(110):
        fleet, ask = running.fleet, Numbers(running.fleet).ask
        pids = [running.pid(0, rank) for rank in range(WORLD_SIZE)]
        want = (await ask(PROMPT)).token_ids
        for level in (1, 2):
            before = [resident_bytes(pid) for pid in pids]
            answer = await fleet.rest.sleep(level, PauseMode.ABORT)
            asleep = [resident_bytes(pid) for pid in pids]
            expected = weight_bytes() + KV_BYTES
            for rank in range(WORLD_SIZE):
                assert before[rank] - asleep[rank] >= 0.9 * expected
                assert answer["0"][rank].freed_bytes >= 0.9 * expected
                assert answer["0"][rank].taken_bytes == pytest.approx(asleep[rank], abs=4 << 20)
            await fleet.rest.wake_up([WEIGHTS])
            woken = [resident_bytes(pid) for pid in pids]
            for rank in range(WORLD_SIZE):
                assert woken[rank] - asleep[rank] >= 0.9 * weight_bytes()
            assert not fleet.ready
            await fleet.rest.wake_up([KV_CACHE])
            again = await ask(PROMPT)
            assert again.token_ids == want
            assert again.started is not None
            assert again.started.num_cached_tokens == 0
            for rank in range(WORLD_SIZE):
                assert resident_bytes(pids[rank]) - asleep[rank] >= 0.9 * expected
        assert [running.pid(0, rank) for rank in range(WORLD_SIZE)] == pids


async def test_weights_are_replaced_on_all_ranks_or_on_none(checkpoints: Path, tmp_path: Path) -> None:
    model = tmp_path / "first"
    shutil.copytree(checkpoints / "first", model)
    async with two_ranks(model) as running, asyncio.timeout(110):
        fleet, numbers = running.fleet, Numbers(running.fleet)
        old = (await numbers.ask(SHORT)).token_ids[0]
        for path, sentence in wrong_checkpoints(tmp_path):
            with pytest.raises(InvalidParameter, match=sentence):
                await fleet.rest.update_weights(str(path))
            assert fleet.ready
        assert (await numbers.ask(SHORT)).token_ids[0] == old

        # Under a request that runs: it goes on over sleeps, and what follows new weights is the new model's.
        stream = await numbers.begin([*SHORT, 7], 120)
        result = asyncio.create_task(collect(stream))
        for level in (1, 2):
            await until(lambda: fleet.status().num_running == 1, "it runs")
            await fleet.rest.sleep(level, PauseMode.KEEP)
            assert (fleet.status().num_running, fleet.status().num_waiting) == (0, 1)
            if level == 2:
                await cannot_wake_without_its_source(fleet, model)
            await fleet.rest.wake_up(())
        await until(lambda: fleet.status().num_running == 1, "it runs")
        assert await fleet.rest.update_weights(str(checkpoints / "second")) == len(tiny_tensors(CONFIG))
        after = await numbers.ask(SHORT)
        assert after.started is not None
        assert after.started.num_cached_tokens == 0
        assert after.token_ids[0] != old
        ended = (await result).token_ids[0]
        assert len(ended) == 120
        outputs = [(SHORT, after.token_ids[0]), ([*SHORT, 7, *ended[:-10]], ended[-10:])]

        # Weights that sleep, at either level, are awake when others came.
        first_again = []
        for level, name in ((1, "first"), (2, "second")):
            await fleet.rest.sleep(level, PauseMode.ABORT)
            await fleet.rest.update_weights(str(checkpoints / name))
            assert fleet.rest.tags == ["kv_cache", "scheduling"]
            await fleet.rest.wake_up([KV_CACHE])
            first_again.append((await numbers.ask(SHORT)).token_ids[0])
        assert first_again == [old, after.token_ids[0]]
    assert_greedy(of_transformers(checkpoints / "first"), [(SHORT, old), ([*SHORT, 7], ended[:2])])
    assert_greedy(of_transformers(checkpoints / "second"), outputs)


def wrong_checkpoints(directory: Path) -> list[tuple[Path, str]]:
    name, norm = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
    wrong: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "shape": ({name: torch.zeros(512, 511)}, CONFIG, f"tensor {name} must have shape"),
        "type": ({norm: torch.ones(512, dtype=torch.bfloat16)}, CONFIG, f"tensor {norm} must be of type F32"),
        "missing": ({norm: None}, CONFIG, f"tensor {norm} must be in the checkpoint"),
        "config": ({}, {**CONFIG, "rms_norm_eps": 1e-3}, r"rms_norm_eps is 0\.001, not 1e-05"),
    }
    made = [
        (write_model(directory / kind, seed=2, config=config, **changed), sentence)
        for kind, (changed, config, sentence) in wrong.items()
    ]
    cut = write_model(directory / "cut", seed=2)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 20)
    return [*made, (cut, "cut off"), (directory / "nowhere", "must be a directory where the workers run")]


async def cannot_wake_without_its_source(fleet: Fleet, model: Path) -> None:
    elsewhere = await asyncio.to_thread(model.rename, model.with_name("elsewhere"))
    with pytest.raises(WrongState, match=r"rank \d: the weights cannot be read again: .*config\.json"):
        await fleet.rest.wake_up(())
    assert fleet.rest.tags == ["weights", "kv_cache", "scheduling"]
    assert fleet.not_ready_reason == "asleep: weights, kv_cache"
    await asyncio.to_thread(elsewhere.rename, model)
