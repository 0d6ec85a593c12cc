"""Rebuild a ``tokenizer.json`` from the byte-level BPE vocabulary that a GGUF file carries.

A GGUF names its pre-tokenizer (``tokenizer.ggml.pre``) and does not spell it out: how each name splits text is
knowledge of llama.cpp, kept here as a table. Other names are refused, since a wrong split gives wrong ids silently.
Source of behaviour: llama.cpp's vocabulary loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from service_chassis.errors import InvalidParameter

# Values of tokenizer.ggml.token_type.
_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Split:
    """How one named pre-tokenizer cuts text before the merges."""

    regex: str | None = None  # None: GPT-2's own
    individual_digits: bool = False  # cut every digit off first
    whole_words_first: bool = False  # a piece that is in the vocabulary is not cut, whatever the merges say
    nfc: bool = False
    adds_bos: bool = False  # unless the file says otherwise


_DIGITS = _Split(individual_digits=True)
_LLAMA3 = _Split(_LLAMA3_SPLIT, whole_words_first=True, adds_bos=True)
_QWEN2 = _Split(_QWEN2_SPLIT, nfc=True)
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokenizer fields of a GGUF file; ids are None where the file names none."""

    model: str
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    bos_token_id: int | None
    add_bos_token: bool | None


def adds_bos(vocabulary: GgufVocabulary) -> bool:
    """Say whether encoding begins with the beginning-of-text token."""
    wanted = vocabulary.add_bos_token
    return (_SPLITS[vocabulary.pre].adds_bos if wanted is None else wanted) and vocabulary.bos_token_id is not None


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build the tokenizer.

    Raises:
        InvalidParameter: the file's tokenizer is of a kind that is not known here.
    """
    if vocabulary.model != "gpt2":
        raise InvalidParameter("tokenizer.ggml.model", vocabulary.model, "must be gpt2 (byte-level BPE)")
    if vocabulary.pre not in _SPLITS:
        raise InvalidParameter("tokenizer.ggml.pre", vocabulary.pre, f"must be one of {', '.join(sorted(_SPLITS))}")
    split = _SPLITS[vocabulary.pre]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise InvalidParameter("tokenizer.ggml.tokens", len(vocabulary.tokens), "must not name a token twice")
    merges = [_pair(merge) for merge in vocabulary.merges]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges, fuse_unk=False, ignore_merges=split.whole_words_first))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(vocabulary, _CONTROL))
    tokenizer.add_tokens(_added(vocabulary, _USER_DEFINED))
    bos_id = vocabulary.bos_token_id
    if bos_id is not None and adds_bos(vocabulary):
        bos = vocabulary.tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    return pre_tokenizers.Sequence(steps)


def _added(vocabulary: GgufVocabulary, kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, token_type in zip(vocabulary.tokens, vocabulary.token_types, strict=False)
        if token_type == kind
    ]
