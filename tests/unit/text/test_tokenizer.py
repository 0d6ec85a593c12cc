"""Tokenizers: the scripted ones, and those of model directories against transformers."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from control_plane.text.tokenizer import Tokenizer
from service_chassis.errors import ConfigurationError, InvalidParameter
from support.demo_model import demo_directory
from support.text import of_bytes, of_tokens

TEXTS = [
    "Hello, world!",
    "  leading, double  spaces\tand\nlines\n\n",
    "naïve café 🦩👩‍👩‍👧 日本語 Привет",
    "1234567890 3.14 x² ½",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x ** 2  # comment",
    "don't can't I'll WE'VE",
    "\u0000\u0007\ufeff\u200d",
    "a" * 300,
]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_directory(demo_directory())


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(demo_directory())
    return loaded


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_demo_model_is_tokenized_as_by_transformers(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, text: str, add_special_tokens: bool
) -> None:
    ids = ours.encode(text, add_special_tokens=add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_scripted_bytes_are_ids() -> None:
    tokenizer = Tokenizer.for_scripted()
    everything = bytes(range(1, 128)).decode() + "é🦩"
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode(everything) == list(everything.encode())
    assert tokenizer.decode(list(everything.encode())) == everything
    assert tokenizer.encode("<|system|>a<|end|><|user|><|assistant|>") == [259, 97, 256, 257, 258]


def test_given_vocabulary_splits_into_the_longest_tokens() -> None:
    tokenizer = of_tokens("a", "ab", "abc", " ", "é")
    assert tokenizer.vocab_size == 6
    assert tokenizer.encode("abcab aé<end>") == [2, 1, 3, 0, 4, 5]
    assert tokenizer.decode([2, 1, 3, 0, 4]) == "abcab aé"


def test_tokens_of_a_given_vocabulary_may_be_parts_of_characters() -> None:
    emoji = "🦩".encode()
    tokenizer = of_bytes(emoji[:1], emoji[1:3], emoji[3:])
    assert tokenizer.encode("🦩") == [0, 1, 2]
    assert tokenizer.decode([0, 1, 2]) == "🦩"


def test_text_outside_a_given_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="vocabulary"):
        of_tokens("a").encode("ab")


@pytest.mark.parametrize("vocab", [("a",), ("a", "a", "e"), ("", "e")], ids=["one", "twice", "empty"])
def test_impossible_vocabulary_is_refused(vocab: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError):
        Tokenizer.for_scripted(vocab)


def test_tokenizer_survives_being_written_out() -> None:
    ours = Tokenizer.for_scripted()
    other = tokenizers.Tokenizer.from_str(ours.to_json())
    assert other.encode("<|user|>héllo").ids == ours.encode("<|user|>héllo")


def test_post_processor_adds_its_token_only_when_asked(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a a a") == [0, 1, 1, 1]  # neither cut nor padded, whatever the file says
    assert tokenizer.encode("a", add_special_tokens=False) == [1]


@pytest.mark.parametrize("content", [None, "{", json.dumps({"version": "1.0"})], ids=["missing", "cut", "empty"])
def test_unreadable_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_long_texts_are_tokenized_as_by_transformers_while_other_threads_run(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    text = "\n".join(TEXTS) * 300
    longest_wait = [0.0]
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            longest_wait[0] = max(longest_wait[0], time.perf_counter() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    ids = ours.encode(text)
    back = ours.decode(ids)
    took = time.perf_counter() - started
    is_done.set()
    watcher.join()
    assert longest_wait[0] < took / 2, "nothing else ran meanwhile"
    assert ids == theirs.encode(text)
    assert back == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_stands_for_no_more_characters_than_the_longest_has() -> None:
    assert Tokenizer.for_scripted().max_token_chars == len("<|assistant|>")
    unknown = models.WordLevel({"a": 0, "?": 1}, unk_token="?")
    assert Tokenizer(tokenizers.Tokenizer(unknown)).max_token_chars is None
