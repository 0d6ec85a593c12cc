"""Write a constraint as a grammar that llguidance compiles.

What llguidance does not support it names when it compiles; here is refused what has no grammar at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from control_plane.structured_output.constraint import BadConstraint, Constraint, ConstraintKind
from control_plane.structured_output.lark import literal, one_of
from control_plane.structured_output.structural_tag import structural_tag_to_lark

# How GBNF and EBNF define a rule; Lark writes a colon.
_GBNF_DEFINES = "::="


def grammar_text(constraint: Constraint) -> str:
    """Return the grammar of a constraint. Raises ``BadConstraint``; may take its time over hostile text."""
    return _WRITERS[constraint.kind](constraint)


def _json_schema(constraint: Constraint) -> str:
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise BadConstraint(f"must be a JSON schema as JSON text ({error})") from None
    if not isinstance(schema, dict | bool):
        raise BadConstraint("must be a JSON schema: an object or a boolean")
    return LLMatcher.grammar_from_json_schema(constraint.text)


def _json_object(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_json_schema('{"type": "object"}')


def _regex(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_regex(constraint.text)


def _grammar(constraint: Constraint) -> str:
    text = constraint.text
    if _GBNF_DEFINES in text:
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # of many classes, a recursion too deep among them
            raise BadConstraint(f"cannot be read as GBNF: {error}") from None
    return LLMatcher.grammar_from_lark(text)


def _choice(constraint: Constraint) -> str:
    # One terminal, not one rule an option: it costs the same however many there are.
    options = one_of(literal(option) for option in constraint.options)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}\n")


def _structural_tag(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(structural_tag_to_lark(constraint.text))


_WRITERS: dict[ConstraintKind, Callable[[Constraint], str]] = {
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.GRAMMAR: _grammar,
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.STRUCTURAL_TAG: _structural_tag,
}
