"""Masks by hand, and what the scripted model samples under them by its definition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from maniple.v1.scheduler_delta_pb2 import SampleInput
from support.scripted_reference import VOCAB, logits

ROW_BYTES = 36  # one bit for each of 260 ids, up to a multiple of four bytes


def mask(ids: Iterable[int]) -> bytes:
    """Return one row's mask, bit by bit."""
    raw = bytearray(ROW_BYTES)
    for token_id in ids:
        raw[token_id // 8] |= 1 << token_id % 8
    return bytes(raw)


def sample_input(step: int, rows: dict[int, Iterable[int]]) -> SampleInput:
    """Return what step ``step`` waits for: row -> ids that it may sample."""
    bits = b"".join(mask(rows[row]) for row in sorted(rows))
    return SampleInput(step=step, req_indices=sorted(rows), mask_bits=bits)


def void(step: int, *rows: int) -> SampleInput:
    """Return what says that the masks of a step died."""
    return SampleInput(step=step, req_indices=rows, void=True)


def greedy_under(tokens: Sequence[int], ids: Iterable[int]) -> int:
    """Return the likeliest of some ids behind tokens."""
    scores = logits(list(tokens))
    return max(sorted(set(ids) & set(range(VOCAB))), key=lambda token_id: scores[token_id])


def may_follow(options: Iterable[str], output: Sequence[int]) -> set[int]:
    """Return the ids that may follow an output that is to become one of some texts, in the byte vocabulary."""
    text = bytes(output)
    following = [option.encode()[len(text) :] for option in options if option.encode().startswith(text)]
    return {rest[0] if rest else 256 for rest in following}


def greedy_choice(prompt: Sequence[int], options: Sequence[str]) -> list[int]:
    """Return what the scripted model makes of a choice: the ids of one option, and the end of text."""
    tokens = list(prompt)
    while tokens[-1] != 256:
        tokens.append(greedy_under(tokens, may_follow(options, tokens[len(prompt) :])))
    return tokens[len(prompt) :]
