"""What is proposed, against the definition in plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_service.speculation.prompt_lookup import propose


def by_definition(known: list[int], max_tokens: int, lookup_min: int, lookup_max: int) -> list[int]:
    """Most equal last tokens first, the last place of several; the text is written on as if it went on so."""
    for num_equal in range(lookup_max, lookup_min - 1, -1):
        tail = known[-num_equal:]
        for end in range(len(known) - 1, num_equal - 1, -1):
            if known[end - num_equal : end] == tail:
                text = list(known)
                for place in range(end, end + max_tokens):
                    text.append(text[place])
                return text[len(known) :]
    return []


@given(
    known=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_tokens=st.integers(0, 9),
    lookup_min=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_proposal_is_that_of_the_definition(known, max_tokens, lookup_min, more):
    found = propose(np.array(known, np.int32), max_tokens, lookup_min, lookup_min + more)
    assert found.tolist() == by_definition(known, max_tokens, lookup_min, lookup_min + more)


def test_examples():
    def found(known: list[int], *how: int) -> list[int]:
        return propose(np.array(known, np.int32), *how).tolist()

    assert found([1, 2, 3, 9, 1, 2], 3, 2, 4) == [3, 9, 1]
    assert found([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 3, 2, 4) == [4, 9, 1]  # the last place where as many are equal
    assert found([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, 2, 4) == [3]  # more are equal
    assert found([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, 2, 2) == [4]  # more are not asked for
    assert found([1, 2, 3], 3, 1, 4) == []
    assert found([5, 6, 5], 3, 2, 4) == []  # too few are equal
    assert found([4, 4], 5, 1, 4) == [4, 4, 4, 4, 4]  # a period goes on
    assert found([4], 5, 1, 4) == []
