"""Outputs that must match something, through the engine and real groups of the scripted model."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from control_plane.engine import Engine
from control_plane.generation import FinishReason, Generation, TextChoice
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from control_plane.text.model_text import load_model_text
from service_chassis.errors import InvalidParameter
from support.engine_harness import END, Collected, collect, generation, running_engine, scripted
from support.masks import greedy_choice
from support.scripted_reference import greedy, logits
from support.waiting import until
from worker_service.step_work import PROCESSED_LOGPROBS

PROMPT = [5, 250, 17, 0, 5]
OPTIONS = ("yes", "yesterday", "no", "né")
EOS = frozenset({END})
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["cat", "dog", "cow"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}


def regex(pattern: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, pattern)


def choice(*options: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, options=options)


def wanted(request_id: str, constraint: Constraint | None, **more: Any) -> Generation:
    values: dict[str, Any] = {"max_tokens": 80, "eos_ids": EOS, "text": TextChoice(), **more}
    return generation(request_id, PROMPT, constraint=constraint, **values)


async def ask(engine: Engine, one: Generation) -> Collected:
    return await collect(await engine.generate(one))


@pytest.fixture
async def grammars() -> AsyncIterator[GrammarCompiler]:
    """For several engines."""
    text = load_model_text("scripted")
    made = GrammarCompiler(lambda: text)
    yield made
    await made.close()


@pytest.mark.parametrize("depth", [1, 2, 4])
async def test_choice_is_the_likeliest_of_its_options_at_every_depth(depth: int) -> None:
    async with running_engine(max_steps_in_flight=depth) as engine:
        got = await ask(engine, wanted("r", choice(*OPTIONS)))
        assert got.token_ids[0] == greedy_choice(PROMPT, OPTIONS)
        assert got.text[0] in OPTIONS
        assert got.finished[0].reason is FinishReason.STOP
        # The same as a door would see it, of a request that nothing constrains.
        got = await ask(engine, wanted("s", None, max_tokens=5))
        assert got.token_ids[0] == greedy(PROMPT, 5)


async def test_every_kind_gives_what_it_says() -> None:
    tag = {"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}
    structural = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    kinds = {
        "schema": (Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)), 300),
        "regex": (regex("[a-z]{3}(-[0-9]+){2,9}"), 120),
        "grammar": (Constraint(ConstraintKind.GRAMMAR, 'root ::= "(" [a-f]+ ")" ("," root)?'), 120),
        "object": (Constraint(ConstraintKind.JSON_OBJECT), 40),
        "tag": (Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(structural)), 40),
    }
    async with running_engine(max_steps_in_flight=2) as engine:
        requests = [
            wanted(f"{name} {seed}", constraint, max_tokens=most, temperature=1.0, seed=seed)
            for name, (constraint, most) in kinds.items()
            for seed in range(3)
        ]
        outcomes = await asyncio.gather(*(ask(engine, one) for one in requests))
    texts = {one.request_id: (got.text[0], got.finished[0].reason) for one, got in zip(requests, outcomes, strict=True)}
    for name, (text, reason) in texts.items():
        is_whole = reason is FinishReason.STOP
        if name.startswith("schema") and is_whole:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif name.startswith("regex") and is_whole:
            assert re.fullmatch("[a-z]{3}(-[0-9]+){2,9}", text)
        elif name.startswith("grammar") and is_whole:
            assert re.fullmatch(r"\([a-f]+\)(,\([a-f]+\))*", text)
        elif name.startswith("object"):
            assert text.startswith("{")
    assert sum(reason is FinishReason.STOP for _, reason in texts.values()) >= 7


def crowd() -> list[Generation]:
    mates = [generation(f"mate{i}", [i + 1, *range(20 + i)], max_tokens=40, temperature=0.8, seed=i) for i in range(6)]
    constrained = [
        wanted("schema", Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)), temperature=0.7, seed=3, n=2),
        wanted("regex", regex("([a-e]{2} )*"), max_tokens=50, temperature=1.0, seed=4, n=2),
        wanted("choice", choice(*OPTIONS), n=2, temperature=1.5, seed=9),
        wanted("ignore", regex("[xyz]+"), max_tokens=30, ignores_eos=True),
    ]
    return [mate for pair in zip(mates, [*constrained, None, None], strict=True) for mate in pair if mate is not None]


async def test_outputs_are_the_same_alone_in_a_crowd_preempted_and_at_every_depth(grammars: GrammarCompiler) -> None:
    async with running_engine(num_kv_blocks=500, grammars=grammars) as engine:
        alone = {one.request_id: await ask(engine, one) for one in crowd()}
    for depth in (1, 2, 4):
        config = {"block_size": 4, "num_kv_blocks": 60, "max_num_batched_tokens": 32, "max_steps_in_flight": depth}
        async with running_engine(grammars=grammars, **config) as engine:
            outcomes = await asyncio.gather(*(ask(engine, one) for one in crowd()))
            assert engine.status().num_preemptions > 0
        for one, got in zip(crowd(), outcomes, strict=True):
            expected = alone[one.request_id]
            assert got.token_ids == expected.token_ids, (one.request_id, depth)
            assert (got.text, got.finished) == (expected.text, expected.finished)


async def test_ends_early_as_other_outputs_do() -> None:
    async with running_engine(max_steps_in_flight=2) as engine:
        got = await ask(engine, wanted("length", regex("a{50}"), max_tokens=7))
        assert (got.text[0], got.finished[0].reason) == ("aaaaaaa", FinishReason.LENGTH)
        text = TextChoice(stop=("cd",))
        got = await ask(engine, wanted("string", regex("abcdef"), text=text))
        assert (got.text[0], got.finished[0].matched_stop) == ("ab", "cd")
        got = await ask(engine, wanted("id", regex("abc+d"), stop_token_ids=frozenset({ord("c")})))
        assert (got.text[0], got.finished[0].matched_token_id) == ("ab", ord("c"))


async def test_min_tokens_and_the_end_of_text_keep_to_the_grammar() -> None:
    async with running_engine() as engine:
        got = await ask(engine, wanted("a", regex("[ab]*"), min_tokens=12, max_tokens=60))
        assert len(got.token_ids[0]) > 12
        assert set(got.text[0]) <= {"a", "b"}
        # It cannot be as long, and ends where it must.
        got = await ask(engine, wanted("b", regex("ab"), min_tokens=12))
        assert (got.token_ids[0], got.finished[0].reason) == ([97, 98, END], FinishReason.STOP)
        got = await ask(engine, wanted("c", regex("[ab]*"), ignores_eos=True, max_tokens=30))
        assert (len(got.token_ids[0]), got.finished[0].reason) == (30, FinishReason.LENGTH)


async def test_parameters_that_leave_nothing_end_the_request_and_nothing_else() -> None:
    async with running_engine(max_steps_in_flight=2) as engine:
        mate = asyncio.create_task(ask(engine, wanted("mate", regex("[a-z]{30}"))))
        with pytest.raises(InvalidParameter, match="leave no token") as caught:
            await ask(engine, wanted("none", regex("ab"), allowed_token_ids=(97,)))
        assert caught.value.field == "sampling.structured_output.regex"
        assert re.fullmatch("[a-z]{30}", (await mate).text[0])
        await until(lambda: engine.status().num_running == 0, "an idle engine")


async def test_model_that_would_write_something_else_writes_what_is_allowed() -> None:
    async with running_engine(scripted(forced=[122, 98, 99])) as engine:
        got = await ask(engine, wanted("r", regex("[a-c]bc")))
        assert got.text[0] == "abc"


async def test_logprobs_of_masked_scores_know_only_what_was_allowed() -> None:
    async with running_engine() as engine:
        got = await ask(engine, wanted("p", choice("abc", "xyz"), num_logprobs=0, logprobs_mode=PROCESSED_LOGPROBS))
    scores = {one: logits(PROMPT)[one] for one in b"ax"}
    chosen, other = sorted(scores, key=lambda one: -scores[one])
    assert got.token_ids[0][0] == chosen
    assert list(got.logprobs[0].values) == pytest.approx(
        [-math.log1p(math.exp(scores[other] - scores[chosen])), 0.0, 0.0, 0.0], abs=1e-5
    )


async def test_cancelled_while_it_waits_for_its_mask_leaves_nothing() -> None:
    async with running_engine(max_steps_in_flight=4) as engine:
        for number in range(12):
            stream = await engine.generate(wanted(f"r{number}", regex("[a-z]*"), n=3, max_tokens=500))
            mate = await engine.generate(wanted(f"m{number}", choice(*OPTIONS)))
            for _ in range(number):
                await asyncio.sleep(0)
            stream.cancel()
            assert (await collect(mate)).token_ids[0] == greedy_choice(PROMPT, OPTIONS)
        await until(lambda: engine.status().num_running == 0, "an idle engine")


async def test_id_may_be_used_again_at_once_with_another_grammar() -> None:
    async with running_engine(max_steps_in_flight=4) as engine:
        for _ in range(5):
            await engine.generate(wanted("r", regex("[a-z]{400}"), max_tokens=500))
            await asyncio.sleep(0.01)
            assert engine.abort("r")
            got = await ask(engine, wanted("r", choice(*OPTIONS)))
            assert got.token_ids[0] == greedy_choice(PROMPT, OPTIONS)
            engine.abort("r")


@pytest.mark.parametrize(
    "config",
    [
        {"executor": "mp", "tensor_parallel_size": 2, "broadcast_ring": True},
        {"executor": "mp", "tensor_parallel_size": 2, "broadcast_ring": False, "max_steps_in_flight": 4},
    ],
    ids=["ring", "streams"],
)
async def test_ranks_in_processes_agree(config: dict[str, Any]) -> None:
    async with running_engine(**config) as engine:
        requests = [wanted("c", choice(*OPTIONS)), wanted("r", regex("([a-e]{2} )*"), temperature=1.0, seed=4, n=3)]
        got, drawn = await asyncio.gather(*(ask(engine, one) for one in requests))
        assert got.token_ids[0] == greedy_choice(PROMPT, OPTIONS)
        assert all(re.fullmatch("([a-e]{2} )*", text[: len(text) // 3 * 3]) for text in drawn.text.values())
        assert len({*drawn.text.values()}) == 3
