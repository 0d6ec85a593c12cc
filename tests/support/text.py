"""Small tokenizers with known tokens, for tests of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from control_plane.generation import TextChoice
from control_plane.text.detokenizer import Detokenizer
from control_plane.text.tokenizer import Tokenizer

END = "<end>"
PLAIN = TextChoice()


def of_tokens(*tokens: str) -> Tokenizer:
    """A tokenizer with exactly these tokens and an end of text behind them."""
    return Tokenizer.for_scripted((*tokens, END))


def of_bytes(*pieces: bytes) -> Tokenizer:
    """The same with tokens that need not be whole characters."""
    return of_tokens(*(piece.decode("utf-8", "surrogateescape") for piece in pieces))


def streamed(
    tokenizer: Tokenizer,
    pushes: Iterable[Sequence[int]],
    text: TextChoice = PLAIN,
    *,
    prompt: Sequence[int] = (),
    min_tokens: int = 0,
) -> tuple[list[str], str | None, int]:
    """Push until a stop string matches; return the texts, the last from the flush, the match and how many ids count."""
    detokenizer = Detokenizer(tokenizer, text, prompt_token_ids=prompt, min_tokens=min_tokens)
    texts: list[str] = []
    num_tokens = 0
    for push in pushes:
        piece = detokenizer.push(push)
        texts.append(piece.text)
        num_tokens += piece.num_tokens
        if piece.matched_stop is not None:
            return texts, piece.matched_stop, num_tokens
    return [*texts, detokenizer.flush()], None, num_tokens
