"""Write a constraint as a grammar that llguidance compiles.

What llguidance does not support it names when it compiles; here is refused what has no grammar at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

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


def spells_one_of(constraint: Constraint, texts: Iterable[str]) -> bool:
    """Whether an output may have to hold one of ``texts``. Errs on the side of yes."""
    said = "\n".join((constraint.text, *constraint.options))
    bare = said.replace("\\", "")  # as regular expressions and JSON may write it
    return "\\u" in said or "\\x" in said or any(text in said or text in bare for text in texts)


def without_forcing(grammar: str) -> str:
    """Return a grammar whose text may be spelled with any tokens, where only one text is possible too.

    There the library allows the tokens of its own spelling alone. Of the text of a special token that is the special
    token, which it then refuses, since it stands for no text.
    """
    if not grammar.lstrip().startswith("{"):
        return _unforced(grammar)
    try:
        wanted = json.loads(grammar)
        for one in wanted["grammars"]:
            if one.get("json_schema") is not None:
                one["lark_grammar"] = f"start: %json {json.dumps(one.pop('json_schema'))}"
            one["lark_grammar"] = _unforced(one["lark_grammar"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return grammar  # a client's own, in the library's form or in none: the library has the word
    return json.dumps(wanted)


def _unforced(lark: str) -> str:
    lark = lark.removeprefix("%llguidance {}\n")
    # Whoever sets options himself has what he asked for.
    return lark if "%llguidance" in lark else f'%llguidance {{"no_forcing": true}}\n{lark}'


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
