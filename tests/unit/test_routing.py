"""Which group a request goes to: the longest cached prefix, unless that group is overloaded; else the least load."""

from __future__ import annotations

import pytest

from control_plane.routing import MAX_LEAD, Candidate, choose_group

ROWS = 8  # a quarter of them, by which a group with the prefix may lead, is 2


def groups(*loads_and_hits: tuple[int, int]) -> list[Candidate]:
    return [Candidate(num_samples, ROWS, num_cached) for num_samples, num_cached in loads_and_hits]


@pytest.mark.parametrize(
    ("candidates", "chosen", "reason"),
    [
        (groups((3, 0)), 0, "least loaded"),
        (groups((0, 0), (0, 0)), 0, "least loaded"),
        (groups((3, 0), (1, 0), (2, 0)), 1, "least loaded"),
        (groups((1, 0), (1, 32)), 1, "least loaded"),  # equal loads: the one that has it
        (groups((0, 16), (2, 32)), 1, "longest cached prefix"),
        (groups((2, 32), (0, 16)), 0, "longest cached prefix"),
        (groups((0, 0), (3, 512)), 0, "the group with the longest cached prefix is overloaded"),
        (groups((3, 512), (1, 0)), 0, "longest cached prefix"),
        (groups((7, 512), (6, 0)), 0, "longest cached prefix"),
        (groups((8, 512), (7, 0)), 1, "the group with the longest cached prefix is overloaded"),  # it would wait
        (groups((9, 512), (8, 0)), 0, "longest cached prefix"),  # it would wait in both
        (groups((5, 64), (5, 64), (4, 0)), 0, "longest cached prefix"),
        (groups((6, 64), (5, 64), (4, 0)), 1, "longest cached prefix"),  # of two that have it, the emptier
        (groups((4, 64), (1, 48), (0, 0)), 2, "the group with the longest cached prefix is overloaded"),
    ],
)
def test_request_goes_to_the_longest_cached_prefix_unless_that_group_is_overloaded(
    candidates: list[Candidate], chosen: int, reason: str
) -> None:
    choice = choose_group(candidates)
    assert (choice.chosen, choice.reason) == (chosen, reason)


def test_groups_of_different_size_are_compared_by_how_full_they_are() -> None:
    small, large = Candidate(2, 4, 0), Candidate(12, 64, 0)
    assert choose_group([small, large]).chosen == 1


def test_a_prompt_that_all_clients_share_does_not_pile_up_on_one_group() -> None:
    loads = [0, 0]
    for _ in range(40):
        candidates = [Candidate(loads[0], 64, 4096), Candidate(loads[1], 64, 0)]
        loads[choose_group(candidates).chosen] += 1
    assert loads[0] + loads[1] == 40
    assert 0 < loads[0] - loads[1] <= MAX_LEAD * 64 + 1
