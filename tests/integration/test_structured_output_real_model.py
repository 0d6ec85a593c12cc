"""Outputs of a real model and a real vocabulary match what they must, with the same tokens alone and in a crowd."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema

from control_plane.generation import FinishReason, Generation, TextChoice
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from control_plane.text.model_text import load_model_text
from support.demo_model import demo_directory
from support.engine_harness import collect, generation, running_engine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "city": {"enum": ["Roma", "Athenæ", "Αθήνα"]}},
    "required": ["name", "city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
OPTIONS = ("veni", "vidi", "vici, vidi, veni")


async def test_outputs_match_with_the_same_tokens_alone_and_in_a_crowd() -> None:
    text = load_model_text(str(demo_directory()))
    prompt = text.tokenizer.encode("Name a Roman and where he lives, as JSON: ")
    assert len(prompt) < 16  # with its output it needs another block, and one more

    def wanted(request_id: str, constraint: Constraint | None, **more: Any) -> Generation:
        values: dict[str, Any] = {"max_tokens": 40, "eos_ids": frozenset(text.eos_token_ids), **more}
        return generation(request_id, prompt, constraint=constraint, text=TextChoice(), **values)

    requests = [
        wanted("schema", Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)), temperature=0.8, seed=3, n=2),
        wanted("regex", Constraint(ConstraintKind.REGEX, r"[A-Z][a-zé]{2,9} (I|V|X){1,4}"), temperature=1.2, seed=5),
        wanted("choice", Constraint(ConstraintKind.CHOICE, options=OPTIONS)),
    ]
    mates = [wanted(f"mate{number}", None, max_tokens=24, temperature=1.0, seed=number) for number in range(3)]
    config = {"dtype": "float32", "batch_invariant": True, "num_threads": 2, "max_model_len": 128, "max_num_seqs": 8}
    async with running_engine(str(demo_directory()), **config, num_kv_blocks=8, max_steps_in_flight=2) as engine:
        alone = [await collect(await engine.generate(one)) for one in requests]
        for one in requests:
            engine.abort(one.request_id)  # so that the id is free again
        streams = [await engine.generate(one) for one in [*mates, *requests]]
        crowd = (await asyncio.gather(*map(collect, streams)))[len(mates) :]
        assert engine.status().num_preemptions > 0
    assert [got.token_ids for got in crowd] == [got.token_ids for got in alone]
    assert all(end.reason is FinishReason.STOP for got in alone for end in got.finished.values())
    schema, regex, choice = (got.text for got in alone)
    for sample in schema.values():
        jsonschema.validate(json.loads(sample), SCHEMA)
    assert re.fullmatch(r"[A-Z][a-zé]{2,9} (I|V|X){1,4}", regex[0])
    assert choice[0] in OPTIONS
