"""What a sample in its grammar may do next, beside all else that its request says."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from control_plane.generation import SamplingChoice
from control_plane.structured_output.checker import Checker, as_message
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from control_plane.structured_output.grammar_text import grammar_text
from control_plane.structured_output.mask_rules import mask_rules
from control_plane.structured_output.vocabulary import new_matcher, vocabulary_of
from control_plane.structured_output.walk import BURST_S, Pace, Walk
from control_plane.text.model_text import load_model_text
from support.masks import may_follow

END = 256
EOS = frozenset({END})


@cache
def tokenizer() -> LLTokenizer:
    return vocabulary_of(load_model_text("scripted")).build()


def walk(kind: str = "regex", text: str = "", *options: str, vocab_size: int = 260, **sampling: Any) -> Walk:
    matcher = new_matcher(tokenizer(), grammar_text(Constraint(ConstraintKind(kind), text, options)))
    assert not matcher.is_error()
    return Walk(matcher, -(-260 // 32), mask_rules(SamplingChoice(**{"eos_ids": EOS, **sampling}), vocab_size))


def ids(mask: bytes | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def after(one: Walk, text: str = "") -> set[int]:
    Pace().advance([(one, list(text.encode()))])
    assert not one.fault
    return ids(one.mask)


@pytest.mark.parametrize("text", ["<|user|>", "<|end|>"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("choice", "{}"),
        ("json_schema", '{{"const": "{}"}}'),
        ("json_schema", '{{"type": "string", "pattern": "^\\u003c\\\\|(end|user)\\\\|>$"}}'),
        ("regex", "{}"),
        ("grammar", 'start: "{}"'),
        ("grammar", 'root ::= "{}"'),
        ("structural_tag", '{{"format": {{"type": "const_string", "value": "{}"}}}}'),
    ],
)
def test_text_of_a_special_token_is_written_with_ordinary_ones(kind: str, says: str, text: str) -> None:
    said = says.format(text.replace("|", "\\|") if kind == "regex" else text)
    constraint = Constraint(ConstraintKind(kind), *(("", (said,)) if kind == "choice" else (said,)))
    checker = Checker(vocabulary_of(load_model_text("scripted")))
    grammar = checker.answer(as_message(constraint))["grammar"]
    rules = mask_rules(SamplingChoice(eos_ids=EOS), 260)
    one = Walk(new_matcher(tokenizer(), grammar), -(-260 // 32), rules)
    output = f'"{text}"' if kind == "json_schema" else text
    for place in range(len(output)):
        assert ord(output[place]) in after(one, output[place - 1 : place])
    assert after(one, output[-1]) == {END}


OPTIONS = ("yes", "yesterday", "no", "né")


@pytest.mark.parametrize("text", ["", "y", "yes", "yeste", "n", "no", "yesterday"])
def test_mask_holds_what_may_follow_and_nothing_else(text: str) -> None:
    assert after(walk("choice", "", *OPTIONS), text) == may_follow(OPTIONS, list(text.encode()))


def test_mask_of_a_larger_vocabulary_than_the_tokenizers_is_padded_with_nothing() -> None:
    one = walk("regex", "a|b", vocab_size=300)
    assert after(one) == {ord("a"), ord("b")}
    assert len(one.mask or b"") == 4 * 10


def test_mask_of_a_smaller_vocabulary_is_cut() -> None:
    one = walk("regex", "[a-z]", vocab_size=100, eos_ids=frozenset({99}))
    assert after(one) == set(range(ord("a"), 99))


def test_every_end_of_text_ends_where_the_grammar_may_end() -> None:
    assert after(walk("regex", "ab?", eos_ids=frozenset({256, 257})), "a") == {ord("b"), 256, 257}


def test_ignored_end_of_text_is_there_only_where_nothing_else_is() -> None:
    assert after(walk("regex", "ab?", ignores_eos=True), "a") == {ord("b")}
    assert after(walk("regex", "ab?", ignores_eos=True), "ab") == {END}


def test_stop_ids_wait_for_min_tokens_unless_the_grammar_wants_nothing_else() -> None:
    rules = {"min_tokens": 3, "stop_token_ids": frozenset({ord("b")})}
    assert after(walk("regex", "[ab]*", **rules), "a") == {ord("a")}
    assert after(walk("regex", "[ab]*", **rules), "aaa") == {ord("a"), ord("b"), END}
    assert after(walk("regex", "ab", **rules), "a") == {ord("b")}
    assert after(walk("regex", "a", **rules), "a") == {END}


def test_allowed_ids_and_bad_words_of_one_token_narrow_the_mask() -> None:
    assert after(walk("regex", "[a-e]+", allowed_token_ids=(97, 99, 120))) == {97, 99}
    assert after(walk("regex", "[a-e]+", bad_words=((97,), (98, 99)))) == {98, 99, 100, 101}
    assert after(walk("regex", "a", allowed_token_ids=(97,)), "a") == {END}


def test_grammar_that_nothing_allowed_meets_is_a_fault() -> None:
    one = walk("regex", "[a-e]+", allowed_token_ids=(120,))
    Pace().advance([(one, [])])
    assert "leave no token" in one.fault
    assert one.mask is None


def test_token_that_no_mask_allowed_is_a_fault() -> None:
    one = walk("regex", "ab")
    Pace().advance([(one, [ord("z")])])
    assert "leave no token" in one.fault


def test_grammar_that_grows_too_complex_is_a_fault_that_says_so() -> None:
    text = "start: a b c d\na: b? c? d?\nb: a? c? d?\nc: a? b? d?\nd: a? b? c? | /x/"
    one = walk("grammar", text)
    pace = Pace()
    for _ in range(400):
        pace.advance([(one, [ord("x")])])
        if one.fault:
            break
    assert "too complex" in one.fault or "takes too long" in one.fault


def test_time_that_a_grammar_takes_is_counted_against_it_alone() -> None:
    one, mate = walk("regex", "a*"), walk("regex", "a*")
    one.charge(BURST_S / 2)
    assert not one.fault
    one.charge(BURST_S)
    assert "takes too long" in one.fault
    Pace().advance([(one, []), (mate, [])])
    assert one.mask is None
    assert ids(mate.mask) == {97, END}


def test_many_walks_move_on_as_each_would_alone() -> None:
    kinds = [("regex", "[a-c]{1,4}"), ("choice", "", *OPTIONS), ("json_object", ""), ("regex", "no+")]
    texts = ["ab", "y", '{"', "n"]
    alone = [walk(*kind) for kind in kinds]
    together = [walk(*kind) for kind in kinds]
    pace = Pace()
    for one, text in zip(alone, texts, strict=True):
        pace.advance([(one, list(text.encode()))])
    pace.advance([(one, list(text.encode())) for one, text in zip(together, texts, strict=True)])
    assert [one.mask for one in together] == [one.mask for one in alone]


def test_the_end_mask_is_the_end_of_text() -> None:
    assert ids(mask_rules(SamplingChoice(eos_ids=frozenset({2, 256})), 260).end_mask()) == {2, 256}
