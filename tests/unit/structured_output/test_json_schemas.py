"""Outputs drawn at random from masks validate against their schema, as jsonschema reads it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from control_plane.generation import SamplingChoice
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from control_plane.structured_output.grammar_text import grammar_text
from control_plane.structured_output.mask_rules import mask_rules
from control_plane.structured_output.vocabulary import new_matcher, vocabulary_of
from control_plane.structured_output.walk import Pace, Walk
from control_plane.text.model_text import load_model_text

END = 256
# What closes is drawn more often, or strings and lists would hardly ever end; space hardly ever.
_WEIGHTS = {**dict.fromkeys(b"]}", 40.0), ord('"'): 8.0, **dict.fromkeys(b" \n\t\r", 0.1), END: 40.0}
TREE = {"$ref": "#/$defs/tree"}
SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}, "required": ["b"]},
    "more": {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "integer"}},
    "patterns": {"type": "object", "patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": False},
    "enum": {"enum": [1, "one", None, [1, 2], {"a": True}, 0.5]},
    "any of": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "boolean"}}]},
    "all of": {"allOf": [{"required": ["x"]}, {"type": "object", "properties": {"x": {"type": "integer"}}}]},
    "one of": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "types": {"type": ["integer", "null"]},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "items": False, "minItems": 2},
    "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 3},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": TREE}},
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
        **TREE,
    },
    "anything": True,
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return vocabulary_of(load_model_text("scripted")).build()


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_drawn_output_validates(schema: Any, tokenizer: LLTokenizer) -> None:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    matcher = new_matcher(tokenizer, grammar_text(constraint))
    assert not matcher.is_error(), matcher.get_error()
    rules = mask_rules(SamplingChoice(eos_ids=frozenset({END})), 260)
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    pace, draw, outputs = Pace(), random.Random(3), set()
    for _ in range(12):
        walk, output, token_id = Walk(matcher.deep_copy(), 9, rules), bytearray(), None
        while token_id != END and len(output) < 3000:
            pace.advance([(walk, [] if token_id is None else [token_id])])
            assert not walk.fault
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(walk.mask, np.uint8), bitorder="little")).tolist()
            weights = [_WEIGHTS.get(one, 1) for one in allowed]
            (token_id,) = draw.choices(allowed, weights)
            if token_id != END:
                output.append(token_id)
        assert token_id == END
        checker.validate(json.loads(output))
        outputs.add(bytes(output))
    assert len(outputs) > 1
