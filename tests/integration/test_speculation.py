"""Outputs are the same with tokens tried ahead and without, whatever requests ask for (rule a, through everything)."""

from __future__ import annotations

import asyncio
import random

import pytest

from control_plane.delta_recorder import DeltaRecorder
from control_plane.generation import TextChoice
from control_plane.text.tokenizer import Tokenizer
from support.engine_harness import collect, generation, running_engine, scripted
from support.owners import Owner, Reader
from support.remote_ranks import remote_ranks
from support.tiny_checkpoints import tiny_config, write_checkpoint
from support.waiting import until
from worker_service.replay import read_entries, replay

VOCAB = ["a", "b", "c", "d", "<|end|>"]
SPECULATION = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3, "max_steps_in_flight": 1}
LIMITS = {"max_model_len": 120, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 48}


def requests_of_every_kind(count):
    rng = random.Random(5)
    for number in range(count):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        if rng.random() < 0.5:
            prompt = prompt[:5] * rng.randrange(1, 6)
        sampling = {"max_tokens": rng.randrange(1, 40), "n": rng.choice([1, 1, 1, 2])}
        if rng.random() < 0.7:
            sampling |= {"temperature": rng.choice([0.3, 1.0, 1.7]), "seed": rng.randrange(2**32)}
        if rng.random() < 0.3:
            sampling |= rng.choice([{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}])
        if rng.random() < 0.2:
            sampling |= rng.choice([{"repetition_penalty": 1.4}, {"presence_penalty": 0.9, "frequency_penalty": -0.2}])
        if rng.random() < 0.2:
            sampling |= rng.choice([{"bad_words": ((1, 2),)}, {"logit_bias": ((2, 1.5),)}])
        if rng.random() < 0.4:
            sampling |= {"stop_token_ids": frozenset([rng.randrange(4)]), "min_tokens": rng.randrange(0, 9)}
        if rng.random() < 0.3:
            sampling |= {"num_logprobs": rng.choice([0, 2]), "num_prompt_logprobs": rng.choice([None, 1])}
        text = TextChoice(stop=("bcd",)) if rng.random() < 0.3 else None
        yield generation(f"r{number}", prompt, text=text, **sampling)


async def outputs(model, requests, **config):
    """Return what all got, and the scheduler that saw to it."""
    async with running_engine(model, **{**LIMITS, **config}) as engine:
        streams = [await engine.generate(one) for one in requests]
        got = await asyncio.gather(*(collect(stream) for stream in streams))
    told = [
        (one.token_ids, one.text, one.finished, one.logprobs, [part.to_bytes() for part in one.prompt_logprobs])
        for one in got
    ]
    return told, engine._scheduler


@pytest.mark.parametrize("num_kv_blocks", [0, 40], ids=["roomy", "preempting"])
async def test_requests_of_every_kind_get_the_same_with_tokens_tried_ahead(num_kv_blocks):
    # So few tokens that the last ones have nearly always occurred before, and what followed is right one time in four.
    model, limits = scripted(vocab=VOCAB, sampler="torch"), {"num_kv_blocks": num_kv_blocks}
    plain, _ = await outputs(model, requests_of_every_kind(60), **limits)
    tried, scheduler = await outputs(model, requests_of_every_kind(60), **limits, **SPECULATION)
    for number, (one, other) in enumerate(zip(plain, tried, strict=True)):
        assert one == other, f"r{number}"
    assert scheduler.num_accepted_tokens > 100
    assert (scheduler.num_preemptions > 5) == bool(num_kv_blocks)


@pytest.mark.parametrize(
    ("sampling", "text", "reason"),
    [
        ({"max_tokens": 33}, (), "length"),
        ({"max_tokens": 34}, (), "length"),
        ({"max_tokens": 35}, (), "length"),
        ({"max_tokens": 200}, (), "length"),  # the longest context
        ({"max_tokens": 90, "stop_token_ids": frozenset([3])}, (), "stop"),
        ({"max_tokens": 90, "stop_token_ids": frozenset([0]), "min_tokens": 31}, (), "stop"),
        ({"max_tokens": 90, "stop_token_ids": frozenset([2]), "num_logprobs": 1}, (), "stop"),
        ({"max_tokens": 90}, ("cabcabcabca",), "stop"),
        ({"max_tokens": 90, "n": 3, "num_logprobs": 2}, ("bcd",), "stop"),
    ],
)
async def test_output_ends_where_it_must_in_the_middle_of_what_was_accepted(sampling, text, reason):
    model = scripted(vocab=VOCAB, forced=[0, 1, 2] * 15 + [3] + [0, 1, 2, 2] * 20)

    def request():
        return generation("r", [1, 1, 0, 1, 2], text=TextChoice(stop=text), **sampling)

    ((plain, *_), _), ((tried, *_), scheduler) = [
        await outputs(model, [request()], **config) for config in ({}, SPECULATION)
    ]
    assert tried == plain
    assert {end.reason.value for end in tried[2].values()} == {reason}
    num_tokens = sum(map(len, tried[0].values()))
    if num_tokens > 10:
        assert scheduler.num_accepted_tokens > num_tokens / 2


async def test_ranks_of_one_group_try_the_same_and_their_log_replays(tmp_path):
    model, path = scripted(vocab=VOCAB, sampler="torch"), tmp_path / "deltas.log"
    plain, _ = await outputs(model, requests_of_every_kind(24))
    recorder = DeltaRecorder.at(str(path))
    ranks = {"executor": "mp", "tensor_parallel_size": 2}
    tried, scheduler = await outputs(model, requests_of_every_kind(24), recorder=recorder, **ranks, **SPECULATION)
    recorder.close()
    assert tried == plain
    assert scheduler.num_accepted_tokens > 15
    with path.open("rb") as file:
        (tenure,) = replay(read_entries(file))
    assert not tenure.difference
    assert tenure.num_token_digests == tenure.num_results > 20


async def test_outputs_of_a_real_model_are_the_same_where_batches_do_not_matter(tmp_path):
    directory = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"))
    vocabulary = [*(f"<{place}>" for place in range(210)), "<end>"]
    (directory / "tokenizer.json").write_text(Tokenizer.for_scripted(vocabulary).to_json())
    settings = {"dtype": "float32", "batch_invariant": True, "block_size": 16, "num_kv_blocks": 40}
    # Greedy and cool ones run in circles sooner or later, which is what is tried.
    plain, _ = await outputs(str(directory), requests_of_every_kind(10), **settings)
    tried, scheduler = await outputs(str(directory), requests_of_every_kind(10), **settings, **SPECULATION)
    for number, (one, other) in enumerate(zip(plain, tried, strict=True)):
        assert one == other, f"r{number}"
    assert scheduler.num_accepted_tokens > 20


async def test_next_owner_goes_on_from_what_was_accepted(tmp_path):
    model = scripted(vocab=VOCAB, sampler="numpy", step_time_s=0.01)

    def made():
        for number in range(4):
            yield generation(f"r{number}", [0, 1, 0, 1, number], max_tokens=100, seed=number, temperature=0.9)

    plain, _ = await outputs(model, made())
    settings = {"model": model, "max_model_len": 120, **SPECULATION}
    with remote_ranks(1, directory=tmp_path) as ranks:
        async with asyncio.timeout(60):
            first = await Owner(ranks.addresses, **settings).start()
            readers = [Reader(f"r{number}", tokens[0]) for number, (tokens, *_) in enumerate(plain)]
            for reader, wanted in zip(readers, made(), strict=True):
                await reader.begin(first, wanted)
            await until(lambda: all(len(reader.token_ids) > 15 for reader in readers), "some tokens of each")
            accepted = first.engine._scheduler.num_accepted_tokens
            await first.die()
            assert accepted > 3
            # How many are tried is the group's: an owner that was told nothing of it goes on as the first did.
            second = await Owner(ranks.addresses, model=model, max_model_len=120).start()
            assert second.engine._scheduler.limits.num_speculative_tokens == 4
            for reader in readers:
                await reader.resume(second)
            for reader in readers:
                await reader.whole()
            assert second.engine._scheduler.num_accepted_tokens > 3
            await second.leave()
