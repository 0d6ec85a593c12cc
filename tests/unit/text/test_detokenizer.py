"""Text from ids: whole characters only, stop strings exactly once (cases F1, F3, F4)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

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


def byte_fallback_tokenizer() -> Tokenizer:
    """Pieces with a mark for spaces, and bytes for what they cannot write, as Llama and Mistral have it."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdet.!", "▁the", "▁a", "te", "é"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("t", "e")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return Tokenizer(backend)


BULK = {"bytes": Tokenizer.for_scripted(), "byte fallback": byte_fallback_tokenizer()}
CHARACTERS = ["a", "b", "te", " ", " the", "é", "東", "🦩", ".", "!"]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", BULK)
def test_many_ids_at_once_give_what_they_give_one_by_one(kind: str, seed: int) -> None:
    tokenizer, rng = BULK[kind], random.Random(seed)
    text = "".join(rng.choices(CHARACTERS, k=400))
    ids = tokenizer.encode(text, add_special_tokens=False)
    if seed % 4 == 1:  # not UTF-8 somewhere, or special tokens
        for _ in range(3):
            ids.insert(rng.randrange(len(ids)), rng.choice([0x80, 0xF0, 0xE6, tokenizer.vocab_size - 1]))
    cut = rng.randrange(1, 30)
    prompt, ids = ids[:cut], ids[cut : len(ids) - rng.randrange(4)]
    where = rng.randrange(len(text) - 8)
    stops = {0: (), 1: ("zzz", "te!x"), 2: (text[where : where + 7],), 3: ("the the", "\U0001f9a9é")}[seed % 4]
    choice = TextChoice(stop=stops, include_stop_str_in_output=seed % 3 == 0, skip_special_tokens=seed % 5 > 0)
    min_tokens = rng.choice([0, 0, 90])

    def told(pushes: list[list[int]]) -> tuple[str, str | None, int]:
        texts, matched, num_tokens = streamed(tokenizer, pushes, choice, prompt=prompt, min_tokens=min_tokens)
        return "".join(texts), matched, num_tokens

    expected = told([[one] for one in ids])
    assert told([ids]) == expected
    cuts = sorted({0, len(ids), *(rng.randrange(len(ids)) for _ in range(3))})
    assert told([ids[begin:end] for begin, end in itertools.pairwise(cuts)]) == expected


@pytest.mark.parametrize("stop", [(), ("never there",)])
@pytest.mark.parametrize("kind", BULK)
def test_many_ids_are_decoded_at_once(kind: str, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = BULK[kind]
    ids = tokenizer.encode("the 🦩 ate é. " * 200, add_special_tokens=False)
    num_steps = 0
    step = Tokenizer.step

    def counted(self: Tokenizer, stream: Any, token_id: int) -> str | None:
        nonlocal num_steps
        num_steps += 1
        return step(self, stream, token_id)

    monkeypatch.setattr(Tokenizer, "step", counted)
    texts, _, num_tokens = streamed(tokenizer, [ids[8:]], TextChoice(stop=stop), prompt=ids[:8])
    assert num_tokens == len(ids) - 8 > 1000
    assert num_steps < 40
    assert len("".join(texts)) > 2000


@pytest.mark.parametrize("kind", BULK)
def test_output_behind_a_prompt_cut_anywhere_is_the_rest_of_the_text(kind: str) -> None:
    tokenizer = BULK[kind]
    text = "é🦩🦩東🦩東🦩 the🦩"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(1, len(ids)):
        texts, _, _ = streamed(tokenizer, [[one] for one in ids[cut:]], prompt=ids[:cut])
        # The first character whose end is not in the prompt is the output's, as a whole.
        num_prompt_chars = sum(
            len(tokenizer.encode(text[: n + 1], add_special_tokens=False)) <= cut for n in range(len(text))
        )
        assert "".join(texts) == text[num_prompt_chars:], cut
