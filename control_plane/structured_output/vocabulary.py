"""The model's vocabulary as llguidance needs it, and the limits under which it compiles and computes.

Both ends of a compilation use these, the process that tries it and the one that serves it, so that what passed there
passes here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:
    from control_plane.text.model_text import ModelText

_SILENT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a grammar is compiled for."""

    tokenizer_json: str
    vocab_size: int  # of the tokenizer; a model may have more ids, which stand for no text
    eos_ids: tuple[int, ...]  # end of text; at least one

    def build(self) -> LLTokenizer:
        """Return the library's form. Takes seconds for the largest vocabularies, and holds the interpreter's lock."""
        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_ids))

    def special_texts(self) -> tuple[str, ...]:
        """Return how special tokens are written where somebody shows them."""
        added = json.loads(self.tokenizer_json).get("added_tokens") or ()
        return tuple(token["content"] for token in added if token.get("special") and token["content"])

    def to_dict(self) -> dict[str, object]:
        """Return what ``from_dict`` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Vocabulary:
        """Read what another process wrote."""
        eos_ids: Sequence[int] = values["eos_ids"]  # type: ignore[assignment]
        return cls(
            tokenizer_json=str(values["tokenizer_json"]),
            vocab_size=int(values["vocab_size"]),  # type: ignore[call-overload]
            eos_ids=tuple(eos_ids),
        )


def vocabulary_of(text: ModelText) -> Vocabulary:
    """Return the vocabulary of a model."""
    tokenizer = text.tokenizer
    return Vocabulary(
        tokenizer_json=tokenizer.to_json(),
        vocab_size=tokenizer.vocab_size,
        eos_ids=tuple(one for one in text.eos_token_ids if one < tokenizer.vocab_size),
    )


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar; what is wrong with it the matcher says itself. Lets other threads run meanwhile."""
    limits = LLParserLimits(
        # A row holds an item for each optional property of an object that could come next, and some more.
        max_items_in_row=8_000,
        # A state has some kilobytes, and an output meets a few new ones with each token at worst.
        max_lexer_states=20_000,
        # Its messages would repeat the grammar, which is the client's.
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=limits)
