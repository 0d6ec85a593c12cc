"""Turn text into token ids and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from control_plane.text.model_files import DirectoryFiles, ModelFiles
from control_plane.text.scripted_tokenizer import byte_tokenizer, vocabulary_tokenizer
from service_chassis.errors import ConfigurationError, InvalidParameter

# From so many characters or ids on the library's batch functions are called: unlike the others they let other threads
# run meanwhile, the event loop's too.
_LONG = 4096
# So many code points at most are composed into one by a normalizer.
_COMPOSED = 4


class Tokenizer:
    """A model's tokenizer. Immutable after construction; may be used from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may ask for truncation or padding, which are habits of training: a server that cuts a prompt
        # without a word is wrong.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        # id -> text of the tokens outside of the model's vocabulary proper, special ones and others
        self.added_tokens = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        parts = json.loads(backend.to_str())
        self.max_token_chars = _max_token_chars(backend, parts)  # of text that one token stands for; None: any number
        # Each token stands for bytes of its own, whatever is around it, but at the beginning of a text: then the text
        # of a long row is that of its parts, wherever they meet between two characters.
        self.is_concatenative = _is_concatenative(parts["decoder"])

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json`` of a model directory. Raises ``ConfigurationError``."""
        return cls.from_files(DirectoryFiles(path))

    @classmethod
    def from_files(cls, files: ModelFiles) -> Tokenizer:
        """Read ``tokenizer.json`` among a model's files. Raises ``ConfigurationError``."""
        path = files.path_of("tokenizer.json")
        try:
            content = files.read("tokenizer.json")
            if content is None:
                rule = "has no tokenizer.json (transformers writes one when it saves a tokenizer)"
                raise ConfigurationError([("model", files.place, rule)])
            return cls(tokenizers.Tokenizer.from_buffer(content))
        except ConfigurationError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise ConfigurationError([("model", path, f"cannot be read as a tokenizer: {error}")]) from error

    @classmethod
    def for_scripted(cls, vocab: Sequence[str] | None = None) -> Tokenizer:
        """Return the scripted model's byte tokenizer, or one with the given tokens, the last of which ends the text."""
        return cls(byte_tokenizer() if vocab is None else vocabulary_tokenizer(vocab))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, with what the model's post-processor adds (a first token, usually)."""
        try:
            if len(text) < _LONG:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except Exception as error:
            # Only vocabularies without an unknown token fail here; the library names no class.
            raise InvalidParameter("text", text, f"cannot be written in the model's vocabulary ({error})") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; invalid bytes become U+FFFD, ids that no token has leave none."""
        ids, text = list(token_ids), ""
        if len(ids) < _LONG:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def decode_stream(self, *, skip_special_tokens: bool = True) -> DecodeStream:
        """Return a new incremental decoder for ``step``."""
        return DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """Advance a decoder by one token; None while its text may still change. Raises what the library raises."""
        return stream.step(self._backend, token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def to_json(self) -> str:
        """Return a tokenizer.json from which anybody can build the same tokenizer."""
        text: str = self._backend.to_str()
        return text


# Decoders, and parts of them, that treat each token alone, or only the very beginning of a text.
_TOKEN_BY_TOKEN = frozenset({"ByteLevel", "Metaspace", "ByteFallback", "Fuse"})


def _is_concatenative(decoder: dict[str, Any] | None) -> bool:
    """Say whether a decoder, as tokenizer.json describes it, is known to work token by token."""
    if decoder is None:
        return False
    kind = decoder["type"]
    if kind == "Sequence":
        return all(map(_is_concatenative, decoder["decoders"]))
    if kind == "Replace":  # of the character that stands for a space, and never across tokens
        return len(decoder["pattern"].get("String", "")) == 1
    if kind == "Strip":
        return not decoder["stop"]
    return kind in _TOKEN_BY_TOKEN


def _max_token_chars(backend: tokenizers.Tokenizer, parts: dict[str, Any]) -> int | None:
    """Return the most characters of text that one token stands for; None where an unknown token stands for any word."""
    model = parts["model"]
    has_unknown = model.get("unk_token") is not None or model.get("unk_id") is not None
    if has_unknown and not model.get("byte_fallback"):
        return None
    # A vocabulary writes each byte of a token as at least one character.
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    return longest * (_COMPOSED if parts["normalizer"] else 1)
