"""What a client may say of the output's shape, before anybody looks at what it means."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm

from control_plane.doors.constraint_rules import MAX_CONSTRAINT_BYTES, resolve_constraint
from control_plane.doors.sampling_rules import resolve_sampling
from control_plane.doors.vllm_converters import to_maniple
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from control_plane.text.model_text import load_model_text
from maniple.v1.sampling_pb2 import SamplingParams, StructuredOutput
from service_chassis.errors import InvalidParameter

MODEL = load_model_text("scripted")
CHOICE = StructuredOutput.Choice


def wanted(**said: Any) -> SamplingParams:
    return SamplingParams(structured_output=StructuredOutput(**said))


@pytest.mark.parametrize(
    ("said", "constraint"),
    [
        ({"json_schema": "{}"}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        ({"json_object": True}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"regex": "a|b"}, Constraint(ConstraintKind.REGEX, "a|b")),
        ({"grammar": "start: /a/"}, Constraint(ConstraintKind.GRAMMAR, "start: /a/")),
        ({"choice": CHOICE(options=["b", "a", "b"])}, Constraint(ConstraintKind.CHOICE, options=("b", "a"))),
        ({"structural_tag": "{}"}, Constraint(ConstraintKind.STRUCTURAL_TAG, "{}")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_kind_is_read(said: dict[str, Any], constraint: Constraint) -> None:
    assert resolve_constraint(wanted(**said)) == constraint
    params = dict(said) if "choice" not in said else {"choice": vllm.ChoiceConstraint(choices=said["choice"].options)}
    translated = to_maniple(vllm.GenerateRequest(sampling_params=vllm.SamplingParams(**params)), max_prompt_tokens=10)
    assert resolve_constraint(translated.sampling) == constraint


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({}, "sampling.structured_output"),
        ({"json_schema": ""}, "sampling.structured_output.json_schema"),
        ({"json_object": False}, "sampling.structured_output.json_object"),
        ({"choice": CHOICE()}, "sampling.structured_output.choice.options"),
        ({"choice": CHOICE(options=["a", ""])}, "sampling.structured_output.choice.options"),
        ({"choice": CHOICE(options=map(str, range(10_001)))}, "sampling.structured_output.choice.options"),
        ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "sampling.structured_output.regex"),
        ({"choice": CHOICE(options=["é" * 65_000, "é" * 600])}, "sampling.structured_output.choice"),
    ],
)
def test_what_is_empty_or_too_large_is_refused_by_name(said: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        resolve_constraint(wanted(**said))
    assert caught.value.field == field


def test_a_request_without_a_constraint_has_none() -> None:
    assert resolve_constraint(SamplingParams()) is None


def test_an_output_with_a_constraint_can_always_end() -> None:
    params = wanted(regex="a*")
    params.ignore_eos = True
    choice = resolve_sampling(params, MODEL, vocab_size=260, room=9, draw_seed=lambda: 0)
    assert (choice.eos_ids, choice.ignores_eos) == ({256}, True)
    params.ClearField("structured_output")
    choice = resolve_sampling(params, MODEL, vocab_size=260, room=9, draw_seed=lambda: 0)
    assert (choice.eos_ids, choice.ignores_eos) == (frozenset(), False)
