"""Text from ids: whole characters only, stop strings exactly once (cases F1, F3, F4)."""

from __future__ import annotations

import random

import pytest
import tokenizers

from control_plane.generation import TextChoice
from control_plane.text.tokenizer import Tokenizer
from support.text import of_bytes, of_tokens, streamed

EMOJI = "🦩".encode()  # four bytes


@pytest.mark.parametrize(("include", "expected"), [(False, "Hello "), (True, "Hello STOP")])
def test_stop_string_across_tokens_ends_the_text_before_it(include: bool, expected: str) -> None:
    tokenizer = of_tokens("He", "llo ST", "OP tail")
    choice = TextChoice(stop=("STOP",), include_stop_str_in_output=include)
    texts, matched, num_tokens = streamed(tokenizer, [[0], [1], [2]], choice)
    assert "".join(texts) == expected
    assert texts[:2] == ["He", "llo "]  # "ST" is held back, and nothing else
    assert (matched, num_tokens) == ("STOP", 3)


def test_held_back_text_comes_when_the_stop_string_does_not() -> None:
    tokenizer = of_tokens("a ST", "ART", " ST")
    texts, matched, _ = streamed(tokenizer, [[0], [1], [2]], TextChoice(stop=("STOP",)))
    assert texts == ["a ", "START", " ", "ST"]
    assert matched is None


def test_tokens_behind_the_stop_string_do_not_count() -> None:
    tokenizer = of_tokens("x", "STOP", "y")
    texts, matched, num_tokens = streamed(tokenizer, [[0, 1, 2, 2]], TextChoice(stop=("STOP",)))
    assert ("".join(texts), matched, num_tokens) == ("x", "STOP", 2)


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        (("bc", "abcd"), "xabcd", "xa", "bc"),  # the one that ends first
        (("bcd", "abcd"), "xabcd", "x", "abcd"),  # of those that end together the longest
        (("aab",), "aaab", "a", "aab"),  # the partial match shifts by one
        (("abcabd",), "abcabcabd", "abc", "abcabd"),
        (("é!",), "caféé!", "café", "é!"),
    ],
)
def test_match_does_not_depend_on_where_tokens_are_cut(
    stops: tuple[str, ...], text: str, expected: str, matched: str, cut: int
) -> None:
    pieces = [text[start : start + cut] for start in range(0, len(text), cut)]
    tokens = list(dict.fromkeys(pieces))
    ids = [tokens.index(piece) for piece in pieces]
    texts, found, _ = streamed(of_tokens(*tokens), [[one] for one in ids], TextChoice(stop=stops))
    assert ("".join(texts), found) == (expected, matched)


def test_stop_search_agrees_with_a_naive_search_on_random_text() -> None:
    rng = random.Random(5)
    tokenizer = of_tokens("a", "b", "ab", "ba", "aab")
    names = ["a", "b", "ab", "ba", "aab"]
    for _ in range(300):
        ids = [rng.randrange(5) for _ in range(rng.randrange(1, 25))]
        stops = tuple({"".join(rng.choices("ab", k=rng.randrange(2, 7))) for _ in range(rng.randrange(1, 4))})
        text = "".join(names[one] for one in ids)
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        expected = text if not ends else text[: min(ends)[0] - len(min(ends)[2])]
        texts, matched, _ = streamed(tokenizer, [[one] for one in ids], TextChoice(stop=stops))
        assert "".join(texts) == expected
        assert matched == (min(ends)[2] if ends else None)


def test_stop_string_inside_the_first_min_tokens_is_passed_over() -> None:
    tokenizer = of_tokens("STOP", "x", "ST", "OP")
    choice = TextChoice(stop=("STOP",))
    texts, matched, num_tokens = streamed(tokenizer, [[i] for i in (1, 0, 1, 1, 1, 1, 2, 3, 1)], choice, min_tokens=5)
    assert ("".join(texts), matched, num_tokens) == ("xSTOPxxxx", "STOP", 8)


@pytest.mark.parametrize(("min_tokens", "expected"), [(1, "x"), (2, "xSTOP")])
def test_stop_string_counts_by_the_token_that_completes_it(min_tokens: int, expected: str) -> None:
    tokenizer = of_tokens("xST", "OP")
    texts, _, _ = streamed(tokenizer, [[0], [1]], TextChoice(stop=("STOP",)), min_tokens=min_tokens)
    assert "".join(texts) == expected


def test_character_split_over_three_tokens_comes_whole() -> None:
    tokenizer = of_bytes(b"ok " + EMOJI[:1], EMOJI[1:3], EMOJI[3:], b"!")
    texts, _, _ = streamed(tokenizer, [[0], [1], [2], [3]])
    assert texts == ["", "", "ok 🦩", "!", ""]


def test_incomplete_character_at_the_end_leaves_no_text() -> None:
    tokenizer = of_bytes(b"ok ", b"so" + EMOJI[:2])
    texts, _, _ = streamed(tokenizer, [[0], [1]])
    assert texts == ["ok ", "", "so"]


def test_character_that_the_prompt_began_is_completed_by_the_output() -> None:
    tokenizer = of_bytes(b"prompt" + EMOJI[:2], EMOJI[2:], b" out")
    texts, _, _ = streamed(tokenizer, [[1], [2]], prompt=[0])
    assert "".join(texts) == "🦩 out"


def test_output_that_ends_at_once_repeats_nothing_of_the_prompt() -> None:
    tokenizer = of_bytes(b"prompt" + EMOJI[:2], EMOJI[2:])
    texts, _, _ = streamed(tokenizer, [], prompt=[0])
    assert texts == [""]


@pytest.mark.parametrize("seed", range(8))
def test_text_of_random_bytes_equals_decoding_all_ids_at_once(seed: int) -> None:
    tokenizer = Tokenizer.for_scripted()
    rng = random.Random(seed)
    ids = [rng.randrange(260) for _ in range(400)]
    texts, _, _ = streamed(tokenizer, [[one] for one in ids])
    # Python's own decoder is the independent source; the ids of special tokens leave no text.
    expected = bytes(one for one in ids if one < 256).decode("utf-8", "replace")
    assert "".join(texts) == expected.rstrip("\ufffd")
    assert "".join(streamed(tokenizer, [ids])[0]) == "".join(texts)


def test_endless_invalid_bytes_are_given_out_and_cost_no_quadratic_time() -> None:
    tokenizer = Tokenizer.for_scripted()
    texts, _, _ = streamed(tokenizer, [[0x80] for _ in range(20_000)])
    assert set("".join(texts)) == {"\ufffd"}
    assert len("".join(texts)) > 19_900


def test_skip_text_without_stop_strings_decodes_nothing() -> None:
    texts, matched, num_tokens = streamed(of_tokens("a"), [[0, 0]], TextChoice(skip_text=True))
    assert (texts, matched, num_tokens) == (["", ""], None, 2)


def test_special_tokens_leave_text_only_when_asked() -> None:
    tokenizer = of_tokens("a")
    assert streamed(tokenizer, [[0, 1]])[0] == ["a", ""]
    assert streamed(tokenizer, [[0, 1]], TextChoice(skip_special_tokens=False))[0] == ["a<end>", ""]


def test_special_tokens_are_separated_by_spaces_only_where_the_tokenizer_does_and_the_client_wants_it() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.add_special_tokens(["<x>", "<y>"])  # ids 2 and 3; joined by spaces, as words are without a decoder
    tokenizer, ids = Tokenizer(words), [0, 2, 3, 1, 3, 3, 0]
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "a <x> <y> b <y> <y> a"

    def text_of(**choice: bool) -> str:
        one_by_one = "".join(streamed(tokenizer, [[one] for one in ids], TextChoice(**choice))[0])
        assert "".join(streamed(tokenizer, [ids], TextChoice(**choice))[0]) == one_by_one
        return one_by_one

    assert text_of(skip_special_tokens=False) == shown
    assert text_of(skip_special_tokens=False, spaces_between_special_tokens=False) == "a <x><y> b <y><y> a"
    assert text_of(spaces_between_special_tokens=False) == text_of() == "a b a"
