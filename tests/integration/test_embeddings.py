"""Embeddings through the engine: what transformers gives, whatever happens on the way, and no trace of it left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.engine import Engine
from control_plane.generation import Done, Embedded, FinishReason, Generation, PoolingChoice, SampleFinished
from service_chassis.errors import DeadlineExceeded, NotBuilt
from service_chassis.ids import RequestId
from support.demo_model import demo_directory
from support.engine_harness import collect, generation, running_engine, scripted
from support.scripted_reference import vector
from support.tiny_checkpoints import tiny_config, write_checkpoint
from support.waiting import until

# Prompts are longer than a step's budget, and more rows are there than blocks.
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "num_kv_blocks": 60, "max_model_len": 200, "block_size": 4}


def embedding(request_id: str, prompt: list[int], kind: str = "last", *, normalize: bool = False) -> Generation:
    one = generation(request_id, prompt, max_tokens=1, skip_reading_prefix_cache=kind == "mean")
    return replace(one, pooling=PoolingChoice(is_mean=kind == "mean", normalize=normalize))


async def vector_of(engine: Engine, one: Generation) -> np.ndarray:
    """Read a stream to its end; it holds one vector, its end, and nothing else after it started."""
    events = [event async for event in await engine.generate(one)][1:]
    assert [type(event) for event in events] == [Embedded, SampleFinished, Done]
    assert events[1].reason is FinishReason.STOP
    assert (events[2].num_prompt_tokens, events[2].num_output_tokens) == (len(one.prompt_token_ids), 0)
    return np.array(events[0].vector)


def prompts_of(count: int, ids: range, *, longest: int = 90) -> list[list[int]]:
    rng = random.Random(4)
    shared = [rng.choice(ids) for _ in range(33)]
    return [
        (shared if number % 3 == 0 else []) + [rng.choice(ids) for _ in range(rng.randint(1, longest - 33))]
        for number in range(count)
    ]


def scripted_vector(prompt: list[int], kind: str) -> np.ndarray:
    return np.array(vector(prompt, kind))


async def served(model: str, prompts: list[list[int]], **config: Any) -> dict[tuple[int, str], np.ndarray]:
    """Embed every prompt in both ways, all at once and beside requests that generate."""
    async with running_engine(model, **{**SMALL, **config}) as engine:
        others = [await engine.generate(generation(f"g{k}", prompts[0][: 14 - k], max_tokens=40)) for k in range(6)]
        reading = [asyncio.create_task(collect(stream)) for stream in others]
        keys = [(number, kind) for number in range(len(prompts)) for kind in ("last", "mean")]
        vectors = await asyncio.gather(
            *(vector_of(engine, embedding(f"{kind}{number}", prompts[number], kind)) for number, kind in keys)
        )
        assert all(len(got.token_ids[0]) == 40 for got in await asyncio.gather(*reading))
        await until(lambda: engine.status().num_running == 0, "nothing runs")
        status = engine.status()
        assert status.num_preemptions > 0
        assert status.num_free_blocks + status.num_cached_blocks == engine.limits.num_blocks - 1
    return dict(zip(keys, vectors, strict=True))


@pytest.mark.parametrize("max_steps_in_flight", [1, 3])
async def test_vectors_are_what_the_scripted_model_says_when_rows_are_preempted(max_steps_in_flight: int) -> None:
    prompts = prompts_of(12, range(256))
    vectors = await served("scripted", prompts, max_steps_in_flight=max_steps_in_flight)
    for (number, kind), got in vectors.items():
        np.testing.assert_allclose(got, scripted_vector(prompts[number], kind), rtol=0, atol=1e-6)


def reference_vectors(directory: Path, prompts: list[list[int]]) -> dict[tuple[int, str], np.ndarray]:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    vectors = {}
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            states = model(torch.tensor([prompt])).last_hidden_state[0]
            vectors[number, "last"] = states[-1].numpy()
            vectors[number, "mean"] = states.mean(dim=0).numpy()
    return vectors


def write_model(directory: Path, architecture: str, **sizes: Any) -> Path:
    """Write a checkpoint with a tokenizer that has its ids."""
    from tokenizers import Tokenizer, models

    config = tiny_config(architecture, **sizes)
    write_checkpoint(directory, config)
    vocab = {f"t{index}": index for index in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("architecture", "sizes", "config"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, {}),
        ("Qwen2ForCausalLM", {"sliding_window": 13, "use_sliding_window": True, "max_window_layers": 1}, {}),
        (
            "Qwen3ForCausalLM",
            {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 128},
            {"executor": "mp", "tensor_parallel_size": 2},
        ),
    ],
    ids=["llama", "qwen2-windows", "qwen3-two-ranks"],
)
async def test_vectors_are_those_of_transformers(
    tmp_path: Path, architecture: str, sizes: dict[str, Any], config: dict[str, Any]
) -> None:
    directory = write_model(tmp_path, architecture, **sizes)
    prompts = prompts_of(9, range(211))
    vectors = await served(str(directory), prompts, dtype="float32", **config)
    for key, expected in reference_vectors(directory, prompts).items():
        np.testing.assert_allclose(vectors[key], expected, rtol=0, atol=1e-4, err_msg=str(key))


@pytest.mark.timeout(240)
async def test_vectors_of_the_demo_model_are_those_of_transformers() -> None:
    prompts = prompts_of(3, range(1000, 40000))
    async with running_engine(str(demo_directory()), **SMALL, dtype="float32") as engine:
        for (number, kind), expected in reference_vectors(demo_directory(), prompts).items():
            one = embedding(f"{kind}{number}", prompts[number], kind, normalize=True)
            expected /= np.linalg.norm(expected)
            np.testing.assert_allclose(await vector_of(engine, one), expected, rtol=0, atol=1e-4)


async def test_last_token_reads_the_prefix_cache_and_a_mean_only_fills_it() -> None:
    prompt = list(range(64))
    async with running_engine(**SMALL) as engine:
        cached = []
        for name, kind in (("a", "mean"), ("b", "mean"), ("c", "last"), ("d", "last")):
            stream = await engine.generate(embedding(name, prompt, kind))
            events = [event async for event in stream]
            cached.append(events[-1].num_cached_tokens)
            np.testing.assert_allclose(np.array(events[1].vector), scripted_vector(prompt, kind), rtol=0, atol=1e-6)
        assert cached == [0, 0, 60, 60]  # of 64 tokens the last is always computed, and with it its block


async def test_normalised_vectors_have_length_one() -> None:
    async with running_engine(**SMALL) as engine:
        for kind in ("last", "mean"):
            got = await vector_of(engine, embedding(kind, [5, 6, 7], kind, normalize=True))
            expected = scripted_vector([5, 6, 7], kind)
            np.testing.assert_allclose(got, expected / np.linalg.norm(expected), rtol=0, atol=1e-6)


async def test_more_vectors_than_one_result_may_hold_come_in_several_steps() -> None:
    async with running_engine(**{**SMALL, "num_kv_blocks": 100}) as engine:
        object.__setattr__(engine._scheduler.limits, "max_vectors", 2)
        prompts = [[number, number + 1] for number in range(7)]
        vectors = await asyncio.gather(*(vector_of(engine, embedding(f"r{p[0]}", p)) for p in prompts))
        assert engine.status().step >= 4
    for prompt, got in zip(prompts, vectors, strict=True):
        np.testing.assert_allclose(got, scripted_vector(prompt, "last"), rtol=0, atol=1e-6)


async def test_cancelled_aborted_and_late_embeddings_free_their_blocks() -> None:
    async with running_engine(scripted(step_time_s=0.05), **SMALL) as engine:
        prompt = list(range(150))
        cancelled = await engine.generate(embedding("cancelled", prompt, "mean"))
        aborted = await engine.generate(embedding("aborted", prompt, "mean"))
        late = await engine.generate(
            Generation(
                request_id=RequestId("late"),
                prompt_token_ids=tuple(prompt),
                sampling=aborted.generation.sampling,
                deadline=engine.now() + 0.08,
                pooling=PoolingChoice(),
            )
        )
        await until(lambda: engine.status().num_running > 0, "a row runs")
        cancelled.cancel()
        engine.abort(RequestId("aborted"))
        events = [event async for event in aborted]
        assert [event.reason for event in events if isinstance(event, SampleFinished)] == [FinishReason.ABORT]
        assert not any(isinstance(event, Embedded) for event in events)
        with pytest.raises(DeadlineExceeded):
            _ = [event async for event in late]
        await until(lambda: engine.status().num_running + engine.status().num_waiting == 0, "nothing is left")
        assert engine.status().num_free_blocks + engine.status().num_cached_blocks == SMALL["num_kv_blocks"] - 1
        np.testing.assert_allclose(
            await vector_of(engine, embedding("next", [1, 2])), scripted_vector([1, 2], "last"), rtol=0, atol=1e-6
        )


async def test_workers_of_an_earlier_release_are_asked_for_no_vector() -> None:
    async with running_engine(**SMALL) as engine:
        object.__setattr__(engine.limits, "pooling", False)
        with pytest.raises(NotBuilt, match="cannot embed"):
            await engine.generate(embedding("r", [1, 2]))
