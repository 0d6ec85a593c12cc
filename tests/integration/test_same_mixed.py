"""Sixty-four requests with mixed parameters at once get what each gets alone: tokens, text, ends, log-probabilities.

Rule (a) of docs/equality.md with the scripted model and too few blocks, rule (b) with the weights of a small one.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from control_plane.engine import Engine
from control_plane.generation import Generation, TextChoice
from control_plane.text.tokenizer import Tokenizer
from support.engine_harness import Collected, collect, generation, running_engine, scripted
from support.tiny_checkpoints import tiny_config, write_checkpoint

VOCAB = 211  # of both models, as far as requests name ids
COUNT = 64


def any_requests(seed: int, *, longest: int) -> list[Generation]:
    """Requests of every kind; a third share their prompt's head with another."""
    rng = random.Random(seed)

    def some_ids(count: int) -> list[int]:
        return rng.sample(range(VOCAB), count)

    requests: list[Generation] = []
    for number in range(COUNT):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))]
        if requests and rng.random() < 0.3:
            other = rng.choice(requests).prompt_token_ids
            prompt = [*other[: rng.randrange(1, len(other) + 1)], *prompt[:8]]
        max_tokens = rng.randrange(1, longest + 1)
        choices: dict[str, Any] = {
            "top_p": rng.choice([0.5, 0.95]),
            "top_k": rng.choice([1, 6, 40]),
            "min_p": 0.05,
            "repetition_penalty": rng.choice([0.8, 1.3]),
            "presence_penalty": rng.choice([-1.0, 1.5]),
            "frequency_penalty": rng.choice([-0.5, 0.8]),
            "min_tokens": rng.randrange(max_tokens // 2 + 1),
            "stop_token_ids": frozenset(some_ids(25)),
            "eos_ids": frozenset(some_ids(9)),
            "logit_bias": tuple((one, rng.uniform(-4, 4)) for one in some_ids(5)),
            "allowed_token_ids": tuple(sorted(some_ids(60))),
            "bad_words": ((rng.randrange(VOCAB),), tuple(some_ids(2))),
            "num_logprobs": rng.choice([0, 3]),
            "num_prompt_logprobs": rng.choice([0, 2]),
            "logprobs_mode": rng.choice([1, 2, 3]),
            "n": rng.choice([2, 3]),
            "priority": rng.choice([-1, 1]),
            "skip_reading_prefix_cache": True,
            "cache_namespace": b"0123456789abcdef",
        }
        chosen = {name: value for name, value in choices.items() if rng.random() < 0.3}
        chosen |= {"temperature": rng.choice([0.0, 0.6, 1.0, 1.5]), "seed": rng.getrandbits(64)}
        text = TextChoice(stop=rng.choice([(), ("~",), ("a", "<7>")]), skip_special_tokens=rng.random() < 0.5)
        requests.append(generation(f"r{number}", prompt, max_tokens=max_tokens, text=text, **chosen))
    return requests


async def alone(engine: Engine, requests: list[Generation]) -> list[Collected]:
    return [await collect(await engine.generate(one)) for one in requests]


async def together(engine: Engine, requests: list[Generation]) -> list[Collected]:
    streams = [await engine.generate(one) for one in requests]
    return list(await asyncio.gather(*(collect(stream) for stream in streams)))


def assert_same(requests: list[Generation], solo: list[Collected], crowd: list[Collected]) -> None:
    for request, one, other in zip(requests, solo, crowd, strict=True):
        name = request.request_id
        assert other.token_ids == one.token_ids, name
        assert other.text == one.text, name
        assert other.finished == one.finished, name
        assert other.logprobs == one.logprobs, name
        assert other.prompt_logprobs == one.prompt_logprobs, name
    # The parameters do something: most outputs differ from what greedy ones of the same prompts would be.
    assert len({tuple(one.token_ids[0]) for one in solo}) > COUNT // 2
    assert {one.finished[0].reason.value for one in solo} == {"stop", "length"}


async def test_scripted_requests_get_the_same_in_a_crowd_that_is_preempted() -> None:
    requests = any_requests(seed=1, longest=40)
    settings: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 48, "block_size": 4, "max_model_len": 128}
    settings["step_timeout_s"] = 60.0  # the first step may compile the sampler's kernel
    async with running_engine(scripted(sampler="torch"), num_kv_blocks=2000, **settings) as engine:
        solo = await alone(engine, requests)
    async with running_engine(scripted(sampler="torch"), num_kv_blocks=44, max_steps_in_flight=3, **settings) as engine:
        crowd = await together(engine, requests)
        assert engine.status().num_preemptions >= 3
    assert_same(requests, solo, crowd)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("LlamaForCausalLM"))
    vocabulary = [*(chr(97 + place % 26) if place < 26 else f"<{place}>" for place in range(VOCAB - 1)), "<end>"]
    (directory / "tokenizer.json").write_text(Tokenizer.for_scripted(vocabulary).to_json())
    return directory


async def test_requests_of_a_real_model_get_the_same_in_a_crowd_when_batches_do_not_matter(directory: Path) -> None:
    requests = any_requests(seed=2, longest=12)
    settings: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 48, "max_model_len": 128}
    settings |= {"dtype": "float32", "batch_invariant": True}
    async with running_engine(str(directory), num_kv_blocks=400, **settings) as engine:
        solo = await alone(engine, requests)
    async with running_engine(str(directory), num_kv_blocks=40, **settings) as engine:
        crowd = await together(engine, requests)
    assert_same(requests, solo, crowd)
