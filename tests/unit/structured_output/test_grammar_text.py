"""Constraints as grammars: what they take, letter by letter, and what is refused by name."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from control_plane.structured_output.constraint import BadConstraint, Constraint, ConstraintKind
from control_plane.structured_output.grammar_text import grammar_text
from control_plane.structured_output.vocabulary import new_matcher, vocabulary_of
from control_plane.text.model_text import load_model_text


@cache
def tokenizer() -> LLTokenizer:
    return vocabulary_of(load_model_text("scripted")).build()


def matcher(kind: str, text: str = "", *options: str) -> LLMatcher:
    made = new_matcher(tokenizer(), grammar_text(Constraint(ConstraintKind(kind), text, options)))
    assert not made.is_error(), made.get_error()
    return made


def takes(made: LLMatcher, text: str) -> bool:
    """Whether a text is one that the grammar may end with."""
    walk = made.deep_copy()
    return walk.try_consume_tokens(list(text.encode())) == len(text.encode()) and walk.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"[a-c]{2,3}", ["a", "ab", "abc", "abcc", "xx"]),
        (r"(yes|no)?!", ["!", "yes!", "no!", "yes", "maybe!"]),
        (r"\d+/\d+", ["1/2", "12/", "/", "1/23"]),
        (r"é+", ["é", "éé", "e", ""]),
    ],
)
def test_regex_is_a_full_match(pattern: str, texts: list[str]) -> None:
    made = matcher("regex", pattern)
    assert [takes(made, text) for text in texts] == [re.fullmatch(pattern, text) is not None for text in texts]


def test_choice_takes_any_text_as_it_is() -> None:
    draw = random.Random(5)
    characters = '"\\\n\t\x00\x01\x7f/<|>{}%#? aé😀\u2028'
    options = {"".join(draw.choices(characters, k=draw.randint(1, 6))) for _ in range(200)}
    made = matcher("choice", "", *options)
    assert all(takes(made, option) for option in options)
    assert not takes(made, "b")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"',
        '?start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"',
        'start: item ("," item)*\nitem: WORD | "(" start ")"\nWORD: /[a-z]+/',
    ],
    ids=["gbnf", "lark with a mark", "lark"],
)
def test_grammar_is_lark_or_gbnf(text: str) -> None:
    made = matcher("grammar", text)
    assert [takes(made, one) for one in ("ab", "a,(b,(c))", "a,", "(a", "")] == [True, True, False, False, False]


def test_json_object_is_one() -> None:
    made = matcher("json_object")
    assert [takes(made, one) for one in ("{}", '{"a": [1, null]}', "[]", "1", "{")] == [True, True, False, False, False]


CALL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": CALL, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def tagged(format_: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": format_})


def triggered(**more: Any) -> str:
    tags = [{"begin": one["begin"], "content": {"type": "json_schema", "json_schema": one["schema"]}, "end": one["end"]}
            for one in OLD["structures"]]  # type: ignore[union-attr]  # fmt: skip
    return tagged({"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more})


TAG_A, TAG_B = '<f=a>{"x": 3}</f>', "<f=b>true</f>"


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (json.dumps(OLD), ["", "hi", TAG_A, f"a < b {TAG_A}, {TAG_B}!"], ["<f=c>", "<f=a>{}</f>", "<f=b>true"]),
        (triggered(), ["hi", f"hi {TAG_B} {TAG_A}"], ["hi <f=z"]),
        (triggered(at_least_one=True), [TAG_A, f"{TAG_A} and {TAG_B}."], ["", f"hi {TAG_A}"]),
        (triggered(stop_after_first=True), ["hi", f"hi {TAG_A}"], [f"{TAG_A}{TAG_B}", f"{TAG_A}!"]),
        (triggered(at_least_one=True, stop_after_first=True), [TAG_A, TAG_B], ["", f"{TAG_A}!"]),
        (
            tagged(
                {
                    "type": "sequence",
                    "elements": [
                        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                        {
                            "type": "or",
                            "elements": [
                                {"type": "const_string", "value": "yes"},
                                {"type": "regex", "pattern": r"\d{2}/\d"},
                            ],
                        },
                    ],
                }
            ),
            ["<think>a </ b</think>yes", "<think></think>12/3"],
            ["<think>a</think>", "yes", "<think>a</think>no"],
        ),
        (
            tagged(
                {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "tags": [{"begin": "[", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": "]"}],
                }
            ),
            ["", "[a]", "[a], [bc]"],
            ["[a],", "[a][b]", "[1]"],
        ),
    ],
    ids=["old", "triggered", "at least one", "stop after first", "exactly one", "sequence", "separator"],
)
def test_structural_tag_leaves_free_what_is_free(text: str, good: list[str], bad: list[str]) -> None:
    made = matcher("structural_tag", text)
    assert [one for one in good if not takes(made, one)] == []
    assert [one for one in bad if takes(made, one)] == []


@pytest.mark.parametrize(
    ("kind", "text", "where", "rule"),
    [
        ("json_schema", "{", "", "JSON"),
        ("json_schema", "[1]", "", "an object or a boolean"),
        ("json_schema", "[" * 100_000, "", "JSON"),
        ("grammar", 'root ::= "a" b', "", "Rule 'b' not found"),
        ("grammar", "root ::= " + "(" * 100_000, "", "recursion"),
        ("structural_tag", "1", "", "JSON object"),
        ("structural_tag", "{}", "structures", "a list of objects"),
        ("structural_tag", '{"structures": [{}], "triggers": ["<"]}', "tags[0].begin", "a string"),
        ("structural_tag", tagged({"type": "xml"}), "format.type", "one of const_string, json_schema"),
        (
            "structural_tag",
            tagged({"type": "sequence", "elements": [{"type": "or"}]}),
            "format.elements[0].elements",
            "",
        ),
        (
            "structural_tag",
            tagged({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "x"}]}),
            "format.tags[0].begin",
            "begin with one of the triggers",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_no_constraint_says_where(kind: str, text: str, where: str, rule: str) -> None:
    with pytest.raises(BadConstraint) as caught:
        grammar_text(Constraint(ConstraintKind(kind), text))
    assert caught.value.where == where
    assert rule in caught.value.rule


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json_schema", '{"not": {}}', '"not"'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"if": {}, "then": {}}', '"if", "then"'),
        ("json_schema", '{"$ref": "http://example.com/x"}', "http://example.com/x"),
        ("json_schema", '{"type": "string", "format": "colour"}', "colour"),
        ("regex", "a(?=b)", "look-ahead"),
        ("grammar", "start: /a/ missing", "missing"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_the_library_cannot_do_is_named_by_it(kind: str, text: str, named: str) -> None:
    made = new_matcher(tokenizer(), grammar_text(Constraint(ConstraintKind(kind), text)))
    assert made.is_error()
    assert named in made.get_error()


def test_constraint_is_not_printed() -> None:
    assert "secret" not in repr(Constraint(ConstraintKind.REGEX, "secret")) + repr(
        Constraint(ConstraintKind.CHOICE, options=("secret",))
    )
