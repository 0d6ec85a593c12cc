"""Build the tokenizer of the scripted model: one id a byte, or a vocabulary that a test gives.

Both are ordinary ``tokenizers`` pipelines, so that they can be written out as a tokenizer.json like any model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from service_chassis.errors import ConfigurationError

END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"

# The role's name is the name of its token, so that one line serves all three.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the scripted model knows the roles system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _byte_names() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies (the map of GPT-2)."""
    names: list[str] = []
    shifted = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            names.append(chr(byte))
        else:
            names.append(chr(256 + shifted))
            shifted += 1
    return names


def byte_tokenizer() -> Tokenizer:
    """Return the built-in one: ids 0..255 are bytes, then end of text and the three roles."""
    # A BPE without merges: every byte stays a token of its own.
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(_byte_names())}, merges=[]))
    _byte_level(tokenizer)
    _add_special(tokenizer, [END, USER, ASSISTANT, SYSTEM])
    return tokenizer


def vocabulary_tokenizer(vocab: Sequence[str]) -> Tokenizer:
    r"""Return one with exactly these tokens; the last is end of text.

    Text is split greedily into the longest tokens. A token may be a part of a character: what is not UTF-8 is written
    as lone surrogates (Python's ``surrogateescape``), so the first byte of an emoji is ``"\udcf0"``.
    """
    names = _byte_names()
    if len(vocab) < 2 or len(set(vocab)) != len(vocab) or not all(vocab):
        raise ConfigurationError([("vocab", list(vocab)[:8], "must hold at least two different tokens, none empty")])
    ids: dict[str, int] = {}
    for token_id, token in enumerate(vocab[:-1]):
        try:
            raw = token.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ConfigurationError([("vocab", token, "has a surrogate that stands for no byte")]) from None
        ids["".join(names[byte] for byte in raw)] = token_id
    # WordPiece without a continuation prefix is greedy longest match; the whole text is one word. It has no unknown
    # token: what the vocabulary cannot write is an error of its caller.
    model = models.WordPiece(vocab=ids, unk_token="", max_input_chars_per_word=1 << 30, continuing_subword_prefix="")
    tokenizer = Tokenizer(model)
    _byte_level(tokenizer)
    _add_special(tokenizer, [vocab[-1]])
    return tokenizer


def _byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()


def _add_special(tokenizer: Tokenizer, tokens: list[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
