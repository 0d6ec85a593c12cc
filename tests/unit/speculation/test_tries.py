"""Steps with tokens tried ahead give what steps of one token give, position by position."""

from __future__ import annotations

import random

import numpy as np
import pytest

from worker_service.speculation.acceptance import append_sampled, num_scores_of, places_of_scores, sample_tries
from worker_service.speculation.tries import MiscountedRow, with_tries
from worker_service.step_work import NOT_SAMPLED, Mode, Speculation, StepWork, places_of_tokens


class Table:
    """Rows as a batch has them."""

    def __init__(self, rows: list[list[int]], width: int = 60) -> None:
        self.token_ids = np.zeros((len(rows), width), np.int32)
        self.num_tokens = np.array([len(row) for row in rows], np.int32)
        for place, row in enumerate(rows):
            self.token_ids[place, : len(row)] = row

    def append(self, rows, token_ids):
        assert len(set(rows.tolist())) == len(rows)
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def known(self, row):
        return self.token_ids[row, : self.num_tokens[row]].tolist()


def step(rows, computed, scheduled, samples, tries=(), settled=()):
    return StepWork(
        step=7,
        mode=Mode.RUN,
        rows=np.array(rows, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        num_scheduled_tokens=np.array(scheduled, np.int32),
        samples=np.array(samples, np.bool_),
        speculation=Speculation(tuple(tries), tuple(settled), 2, 4),
    )


def test_step_computes_as_many_tokens_as_there_are_to_try():
    table = Table([[1, 2, 3, 9, 1, 2], [5, 6, 7, 8], [1, 1, 1, 1, 1]])
    work = with_tries(step([0, 1, 2], [5, 3, 0], [4, 4, 3], [True, True, False], tries=(0, 1)), table)
    assert work.num_scheduled_tokens.tolist() == [4, 1, 3]
    assert work.speculation.rows == (0,)
    assert table.token_ids[0, 6:9].tolist() == [3, 9, 1]
    assert table.num_tokens.tolist() == [6, 4, 5]
    assert num_scores_of(work).tolist() == [4, 1]
    assert places_of_scores(work, num_scores_of(work)).tolist() == [0, 1, 2, 3, 4]
    rows, positions = places_of_tokens(work, np.array([3, 1], np.int32))
    assert (rows.tolist(), positions.tolist()) == ([0, 0, 0, 1], [6, 7, 8, 4])


def test_step_in_which_nothing_is_found_is_like_any_other():
    table = Table([[1, 2, 3], [5, 6, 7, 8]])
    work = with_tries(step([0, 1], [2, 3], [3, 1], [True, True], tries=(0,)), table)
    assert work.speculation is None
    assert work.num_scheduled_tokens.tolist() == [1, 1]


@pytest.mark.parametrize("where", ["tries", "settled"])
@pytest.mark.parametrize("computed", [3, 5])
def test_row_that_computed_something_else_than_its_delta_says_is_found(where, computed):
    table = Table([[1, 2, 1, 2, 1]])
    with pytest.raises(MiscountedRow, match=f"row 0 has computed {computed} tokens by its delta, and 4 by"):
        with_tries(step([0], [computed], [2], [True], **{where: (0,)}), table)


@pytest.mark.parametrize("seed", range(20))
def test_rows_get_what_they_would_get_one_token_at_a_time(seed):
    """A "model" that looks at all known tokens, as penalties do; one row is void, one does not sample."""
    rng = random.Random(seed)
    rows = [[rng.randrange(3) for _ in range(rng.randrange(2, 30))] for _ in range(6)]

    def choose(known: list[int]) -> int:
        return hash((tuple(known), seed)) % 3

    alone = Table(rows)
    table, other_rank = Table(rows), Table(rows)
    tries = (0, 1, 2, 3)
    planned = step(range(6), [len(row) - 1 for row in rows], [5, 4, 3, 5, 1, 1], [True] * 5 + [False], tries=tries)
    work = with_tries(planned, table)
    with_tries(planned, other_rank)
    assert (table.token_ids == other_rank.token_ids).all()
    num_scores = num_scores_of(work)
    firsts = np.cumsum(num_scores) - num_scores

    def sample(places, here):
        chosen = []
        for place, row in zip(places.tolist(), here.tolist(), strict=True):
            known = table.known(row)
            assert place == firsts[row] + len(known) - len(rows[row])  # the score behind the last known token
            chosen.append(NOT_SAMPLED if row == 4 else choose(known))
        return np.array(chosen, np.int32)

    sampling = work.rows[work.samples]
    token_ids, num_tokens = sample_tries(sampling, num_scores, table, sample, table.append)
    append_sampled(sampling, token_ids, num_tokens, other_rank.append)
    for row, count in enumerate(num_tokens.tolist()):
        if row == 4:
            assert count == 1
            assert table.known(4) == rows[4]
            continue
        for _ in range(count):
            alone.append(np.array([row]), np.array([choose(alone.known(row))]))
        assert table.known(row) == other_rank.known(row) == alone.known(row)
        assert token_ids[num_tokens[:row].sum() :][:count].tolist() == alone.known(row)[len(rows[row]) :]
        # It went on for as long as what was tried was right, and not a token less.
        proposed = Table(rows)
        with_tries(planned, proposed)
        guesses = proposed.token_ids[row, len(rows[row]) :][: num_scores[row] - 1].tolist()
        sampled = alone.known(row)[len(rows[row]) :]
        right = next((i for i, (a, b) in enumerate(zip(guesses, sampled, strict=False)) if a != b), len(guesses))
        assert count == min(right, num_scores[row] - 1) + 1
