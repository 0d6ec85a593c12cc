"""Choose the group that gets a request. Pure.

A request goes where the longest head of its prompt is cached, since that much of its prefill is saved; unless that
group is overloaded, since a fuller batch slows every token of all its rows and a prefill is slow but once. Else it goes
where the load is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# How much fuller than the emptiest group, in shares of a batch, a group may be and still attract requests by what it
# has cached. A quarter: with 64 rows it is 16, and a prompt that all clients share does not pile up on one group.
MAX_LEAD = 0.25


class Candidate(NamedTuple):
    """One group, as far as the choice depends on it."""

    num_samples: int  # that run or wait
    max_num_seqs: int
    num_cached_tokens: int  # leading tokens of this prompt that it holds

    @property
    def load(self) -> float:
        """How full it is, in batches: above 1 somebody waits."""
        return self.num_samples / self.max_num_seqs


class Choice(NamedTuple):
    """The place of the chosen group among the candidates, and why."""

    chosen: int
    reason: str


def choose_group(candidates: Sequence[Candidate]) -> Choice:
    """Return the group that gets the request; there is at least one candidate."""
    indices = range(len(candidates))
    emptiest = min(indices, key=lambda index: (candidates[index].load, -candidates[index].num_cached_tokens))
    longest = min(indices, key=lambda index: (-candidates[index].num_cached_tokens, candidates[index].load))
    if candidates[longest].num_cached_tokens <= candidates[emptiest].num_cached_tokens:
        return Choice(emptiest, "least loaded")
    if is_overloaded(candidates[longest], candidates[emptiest]):
        return Choice(emptiest, "the group with the longest cached prefix is overloaded")
    return Choice(longest, "longest cached prefix")


def is_overloaded(candidate: Candidate, emptiest: Candidate) -> bool:
    """Say whether a group should get no request that the emptiest group could take instead.

    It is when a request would wait there for a row and not elsewhere, or when it is fuller by more than ``MAX_LEAD``.
    """
    would_wait = candidate.load >= 1 > emptiest.load
    return would_wait or candidate.load - emptiest.load > MAX_LEAD
