"""What streams say of tokens, and what they should: log-probabilities of the scripted model by its definition."""

from __future__ import annotations

import math

import pytest

from service_chassis.protocol.logprobs import Logprobs
from support.scripted_reference import VOCAB, logits
from worker_service.step_work import RAW_LOGITS

# id, value and rank of the token, then ids and values of the likeliest
Position = tuple[int, float, int, list[int], list[float]]


def expected(tokens: list[int], token: int, k: int, *, mode: int = 0, banned: tuple[int, ...] = ()) -> Position:
    """Say by definition what is told of ``token`` behind ``tokens``."""
    scores = [-math.inf if one in banned else score for one, score in enumerate(logits(tokens))]
    total = math.log(sum(math.exp(score) for score in scores))
    values = scores if mode == RAW_LOGITS else [score - total for score in scores]
    order = sorted(range(VOCAB), key=lambda one: (-scores[one], one))
    return token, values[token], 1 + order.index(token), order[:k], [values[one] for one in order[:k]]


def told(columns: Logprobs) -> list[Position | None]:
    """Return the positions of columns; None where one says nothing."""
    found: list[Position | None] = []
    for index, rank in enumerate(columns.ranks):
        ids = list(columns.token_ids[index * columns.width : (index + 1) * columns.width])
        values = list(columns.values[index * columns.width : (index + 1) * columns.width])
        found.append((ids[0], values[0], rank, ids[1:], values[1:]) if rank else None)
    return found


def check(columns: Logprobs | None, wanted: list[Position | None]) -> None:
    assert columns is not None
    got = told(columns)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one[0], one[2], one[3]) == (other[0], other[2], other[3])
            assert [one[1], *one[4]] == pytest.approx([other[1], *other[4]], abs=2e-5)


def of_output(prompt: list[int], output: list[int], k: int) -> list[Position | None]:
    """Say by definition what is told of every token of an output."""
    return [expected(prompt + output[:place], token, k) for place, token in enumerate(output)]


def of_prompt(prompt: list[int], k: int) -> list[Position | None]:
    """Say by definition what is told of every token of a prompt."""
    return [None, *(expected(prompt[:place], prompt[place], k) for place in range(1, len(prompt)))]
