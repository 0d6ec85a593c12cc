"""Groups of several rank processes through the whole path below the doors, and how they end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.generation import Generation
from control_plane.group.loss import LossReason
from service_chassis.scripted import ScriptedOptions, fail_at, scripted_model
from support.demo_model import demo_directory
from support.engine_harness import Collected, collect, generation, running_engine, scripted
from support.faults import SETTINGS, WORKER, LiveGroup, is_alive
from support.greedy_rule import assert_greedy
from support.one_row import OneRow
from support.tiny_checkpoints import tiny_config, write_checkpoint
from support.waiting import until

# Small on purpose: prompts longer than the token budget, and more rows than blocks.
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "num_kv_blocks": 20, "max_model_len": 200, "block_size": 16}


def workload(count: int, *, ids: range, max_tokens: int, seeded: bool = False) -> list[Generation]:
    rng = random.Random(11)
    shared = [rng.choice(ids) for _ in range(37)]
    requests = []
    for number in range(count):
        prompt = (shared if number % 3 == 0 else []) + [rng.choice(ids) for _ in range(rng.randint(1, 40))]
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "n": 2 if number % 5 == 0 else 1}
        if seeded and number % 2:
            sampling |= {"temperature": 1.0, "seed": number}
        requests.append(generation(f"r{number}", prompt, **sampling))
    return requests


async def run_all(model: str, requests: list[Generation], **config: Any) -> tuple[list[Collected], int]:
    """Serve all at once; return what came, and the preemptions."""
    async with running_engine(model, **{**SMALL, **config}) as engine:
        streams = [await engine.generate(one) for one in requests]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        return results, engine.status().num_preemptions


async def test_scripted_tokens_are_the_same_to_the_bit_on_any_number_of_ranks() -> None:
    requests = workload(14, ids=range(256), max_tokens=50, seeded=True)
    want, num_preemptions = await run_all("scripted", requests)
    assert num_preemptions >= 3
    for world_size in (2, 3, 4):
        got, num_preemptions = await run_all("scripted", requests, executor="mp", tensor_parallel_size=world_size)
        assert num_preemptions >= 3
        assert [one.token_ids for one in got] == [one.token_ids for one in want], world_size


def write_model(directory: Path, name: str) -> str:
    """Write a checkpoint that splits by 2 and by 4, with a tokenizer that has its ids."""
    from tokenizers import Tokenizer, models

    sizes = {"num_attention_heads": 8, "hidden_size": 64, "intermediate_size": 128}
    config = {
        "split-kv-heads": tiny_config("LlamaForCausalLM", vocab_size=512, num_key_value_heads=4, **sizes),
        "repeated-kv-heads": tiny_config(
            "Qwen2ForCausalLM", vocab_size=509, num_key_value_heads=2, tie_word_embeddings=True, **sizes
        ),
    }[name]
    write_checkpoint(directory, config)
    vocab = {f"t{index}": index for index in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.mark.parametrize(("name", "world_size"), [("split-kv-heads", 2), ("repeated-kv-heads", 4)])
async def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str, world_size: int) -> None:
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path, name)
    requests = workload(12, ids=range(500), max_tokens=12)
    results, _ = await run_all(model, requests, executor="mp", tensor_parallel_size=world_size, dtype="float32")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    assert_greedy(reference, outputs_of(requests, results))


def outputs_of(requests: list[Generation], results: list[Collected]) -> list[tuple[Any, Any]]:
    return [
        (one.prompt_token_ids, ids)
        for one, got in zip(requests, results, strict=True)
        for ids in got.token_ids.values()
    ]


async def test_greedy_tokens_of_the_demo_model_on_three_ranks_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    requests = workload(6, ids=range(1000, 40000), max_tokens=6)
    model = str(demo_directory())
    async with running_engine(model, **SMALL, executor="mp", tensor_parallel_size=3, dtype="float32") as engine:
        streams = [await engine.generate(one) for one in requests]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    assert_greedy(reference, outputs_of(requests, results))


class Ranks:
    """A formed group of several processes with one row of traffic."""

    def __init__(self, world_size: int, model: str, **settings: Any) -> None:
        executor = MultiprocExecutor(world_size=world_size, settings=WORKER)
        self.live = LiveGroup(executor, replace(SETTINGS, model=model, **settings))
        self.executor = executor

    @property
    def pids(self) -> list[int]:
        return [self.executor.describe_rank(rank)[1] for rank in self.executor.ranks]

    async def lost(self, within_s: float) -> LossReason:
        return await self.live.lost(within_s=within_s)

    async def end(self) -> None:
        await self.live.group.teardown("the test is over")
        assert not any(is_alive(pid) for pid in self.pids)


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_killed_rank_is_blamed_and_the_others_leave_the_step_they_wait_in(victim: int) -> None:
    ranks = Ranks(3, scripted(step_time_s=0.2))
    await ranks.live.form()
    await ranks.live.run_steps(2)
    ranks.live.send_step()
    os.kill(ranks.pids[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    loss = await ranks.lost(within_s=1.0)
    assert (loss.rank, loss.reason) == (victim, f"rank {victim} exited: killed by SIGKILL")
    await until(lambda: not any(map(is_alive, ranks.pids)), "the survivors' end", timeout_s=2.0)
    assert time.monotonic() - killed_at < 2.0
    await ranks.end()


async def test_survivor_in_a_large_sum_leaves_within_two_seconds_of_the_verdict(tmp_path: Path) -> None:
    """Gloo's sums cannot be broken from outside: what ends the survivor is that it was told to go."""
    config = tiny_config("LlamaForCausalLM", hidden_size=1024, num_hidden_layers=1, num_attention_heads=4)
    config |= {"num_key_value_heads": 2, "vocab_size": 512}
    write_checkpoint(tmp_path, config)
    ranks = Ranks(2, str(tmp_path), heartbeat_timeout_s=1.5, max_model_len=512)
    ranks.live.row = OneRow([7] * 400)  # 1.6 MB a sum
    await ranks.live.form()
    os.kill(ranks.pids[1], signal.SIGSTOP)
    ranks.live.send_step()
    loss = await ranks.lost(within_s=4.0)
    assert loss.rank == 1
    lost_at = time.monotonic()
    await until(lambda: not is_alive(ranks.pids[0]), "the survivor's end", timeout_s=2.0)
    assert time.monotonic() - lost_at < 2.0
    await ranks.end()


async def test_rank_that_raises_while_the_others_wait_is_the_one_that_is_named() -> None:
    ranks = Ranks(3, scripted_model(ScriptedOptions(faults=(fail_at(1, 3, "raise"),))))
    await ranks.live.form()
    await ranks.live.run_steps(2)
    ranks.live.send_step()
    loss = await ranks.lost(within_s=1.0)
    assert (loss.rank, loss.reason) == (1, "rank 1 failed in step 3: InjectedFault: injected at rank 1, step 3")
    ranks.live.assert_tokens_exact()
    await ranks.end()
