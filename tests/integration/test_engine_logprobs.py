"""Log-probabilities through a whole engine over the scripted model, whose scores plain Python computes too."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from control_plane.engine import Engine
from control_plane.generation import Cursor, FinishReason, TextChoice
from control_plane.live_request import resumed_stream
from control_plane.scheduling.request import Sample, SampleState
from control_plane.scheduling.scheduler import Scheduler
from support.engine_harness import Collected, collect, generation, running_engine, scripted
from support.logprobs import check, expected, of_output, of_prompt, told
from support.scripted_reference import VOCAB, logits, seeded
from worker_service.step_work import PROCESSED_LOGPROBS, RAW_LOGITS


async def heard(engine: Engine, name: str, prompt: list[int], **options: Any) -> Collected:
    return await collect(await engine.generate(generation(name, prompt, **options)))


PROMPT = [5, 250, 17, 0, 5, 99, 31]


@pytest.mark.parametrize("mode", [0, RAW_LOGITS, PROCESSED_LOGPROBS])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_every_token_comes_with_its_rank_and_the_likeliest(mode: int, temperature: float) -> None:
    choice = {
        "temperature": temperature,
        "seed": 4,
        "min_tokens": 3,
        "eos_ids": frozenset({256}),
        "logprobs_mode": mode,
    }
    async with running_engine(enable_prefix_caching=False) as engine:
        got = await heard(engine, "a", PROMPT, num_logprobs=3, max_tokens=6, **choice)
        plain = await heard(engine, "b", PROMPT, max_tokens=6, **choice)
    output = got.token_ids[0]
    assert output == plain.token_ids[0]  # asking changes nothing
    assert plain.logprobs == {}
    banned = [(256,) if mode == PROCESSED_LOGPROBS and place < 3 else () for place in range(len(output))]
    wanted = [
        expected(PROMPT + output[:place], token, 3, mode=mode, banned=banned[place])
        for place, token in enumerate(output)
    ]
    check(got.logprobs[0], [*wanted])
    assert got.prompt_logprobs == []


async def test_processed_scores_are_those_behind_bias_and_masks() -> None:
    bias = {"logit_bias": ((40, 9.0),), "allowed_token_ids": (40, 41, 42), "logprobs_mode": PROCESSED_LOGPROBS}
    async with running_engine(scripted(sampler="torch")) as engine:
        got = await heard(engine, "a", PROMPT, num_logprobs=4, max_tokens=1, **bias)
    (position,) = told(got.logprobs[0])
    assert position is not None
    scores = logits(PROMPT)
    weights = {40: math.exp(scores[40] + 9), 41: math.exp(scores[41]), 42: math.exp(scores[42])}
    for token, value in zip(position[3][:3], position[4][:3], strict=True):
        assert value == pytest.approx(math.log(weights[token] / sum(weights.values())), abs=2e-5)
    assert position[4][3] == -math.inf


async def test_forced_tokens_are_told_of_too() -> None:
    async with running_engine(scripted(forced=[7, 8])) as engine:
        got = await heard(engine, "a", PROMPT, num_logprobs=0, max_tokens=2)
    check(got.logprobs[0], [expected(PROMPT, 7, 0), expected([*PROMPT, 7], 8, 0)])


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 31, 3 * 16 + 1])
async def test_prompt_is_told_across_chunks_as_in_one_piece(num_tokens: int) -> None:
    """E5: three chunks and one token; as long as the prompt, and nothing is said of the first."""
    prompt = [random.Random(num_tokens).randrange(VOCAB) for _ in range(num_tokens)]
    async with running_engine(max_num_batched_tokens=16, max_num_seqs=16) as engine:
        got = await heard(engine, "a", prompt, num_prompt_logprobs=2, max_tokens=2)
        again = await heard(engine, "b", prompt, num_prompt_logprobs=2, max_tokens=2)
        reader = await heard(engine, "c", prompt, max_tokens=2)
    (columns,) = got.prompt_logprobs
    check(columns, of_prompt(prompt, 2))
    assert again.prompt_logprobs == got.prompt_logprobs
    assert got.logprobs == {}
    # It does not read the prefix cache, and fills it.
    assert again.done is not None
    assert again.done.num_cached_tokens == 0
    assert reader.done is not None
    assert reader.done.num_cached_tokens == (num_tokens - 1) // 16 * 16


async def test_nothing_is_told_twice_or_left_out_when_blocks_are_scarce() -> None:
    """Preemptions hit prompts half-way and outputs; every position is told once, and of the right token."""
    rng = random.Random(8)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(10, 40))] for _ in range(16)]
    async with running_engine(
        num_kv_blocks=27, block_size=4, max_model_len=104, max_num_batched_tokens=11, max_num_seqs=7
    ) as engine:
        streams = [
            await engine.generate(
                generation(str(number), prompt, num_prompt_logprobs=1, num_logprobs=1, max_tokens=25, n=1 + number % 2)
            )
            for number, prompt in enumerate(prompts)
        ]
        collected = [await collect(stream) for stream in streams]
        assert engine.status().num_preemptions >= 5
    for prompt, got in zip(prompts, collected, strict=True):
        (columns,) = got.prompt_logprobs
        check(columns, of_prompt(prompt, 1))
        for index, output in got.token_ids.items():
            assert len(output) == 25
            check(got.logprobs[index], of_output(prompt, output, 1))


async def test_prompt_that_loses_its_blocks_half_way_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[SampleState] = []
    preempt = Scheduler._preempt

    def note(self: Scheduler, draft: Any, sample: Sample) -> None:
        preempted.append(sample.state)
        preempt(self, draft, sample)

    monkeypatch.setattr(Scheduler, "_preempt", note)
    prompt = [random.Random(4).randrange(VOCAB) for _ in range(60)]
    settings = {"num_kv_blocks": 27, "block_size": 4, "max_model_len": 104, "max_num_batched_tokens": 8}
    async with running_engine(max_num_seqs=8, **settings) as engine:
        others = [await engine.generate(generation(f"o{number}", [number], max_tokens=20)) for number in range(4)]
        stream = await engine.generate(generation("a", prompt, num_prompt_logprobs=1, max_tokens=2))
        got = await collect(stream)
        for other in others:
            await collect(other)
    assert SampleState.PREFILL in preempted
    (columns,) = got.prompt_logprobs
    check(columns, of_prompt(prompt, 1))


async def test_each_sample_is_told_of_its_own_tokens_and_the_prompt_once() -> None:
    async with running_engine() as engine:
        got = await heard(
            engine, "a", PROMPT, n=3, temperature=1.0, seed=9, num_logprobs=1, num_prompt_logprobs=0, max_tokens=5
        )
    (columns,) = got.prompt_logprobs
    check(columns, of_prompt(PROMPT, 0))
    for index in range(3):
        output = got.token_ids[index]
        assert output == seeded(PROMPT, 5, 9, index, 1.0)
        check(got.logprobs[index], of_output(PROMPT, output, 1))


async def test_tokens_behind_a_stop_string_are_told_nothing_of() -> None:
    text = TextChoice(stop=("two",))
    async with running_engine(scripted(forced=[*b"one two three"]), max_steps_in_flight=4) as engine:
        got = await heard(engine, "a", PROMPT, num_logprobs=1, max_tokens=13, text=text)
    assert got.text[0] == "one "
    assert got.finished[0].reason is FinishReason.STOP
    assert got.token_ids[0] == [*b"one two"]
    assert len(got.logprobs[0]) == len(b"one two")


async def test_client_that_reads_late_gets_everything_in_order() -> None:
    async with running_engine() as engine:
        stream = await engine.generate(generation("a", PROMPT, num_logprobs=2, max_tokens=40))
        await engine.wait_idle()
        got = await collect(stream)
    assert len(got.token_ids[0]) == 40
    check(got.logprobs[0], of_output(PROMPT, got.token_ids[0], 2))


async def test_resumed_stream_is_told_of_what_lies_behind_its_cursor() -> None:
    async with running_engine() as engine:
        stream = await engine.generate(generation("a", PROMPT, num_logprobs=1, num_prompt_logprobs=1, max_tokens=20))
        first = await collect(stream)
        live = engine._ids.record(stream.generation.request_id, engine.now())
        assert live is not None
        second = await collect(resumed_stream(live, live.right.token, "", [Cursor(index=0, num_tokens=13)]))
    assert second.token_ids[0] == first.token_ids[0][13:]
    assert second.logprobs[0] == first.logprobs[0].part(13)
    assert second.prompt_logprobs == first.prompt_logprobs
