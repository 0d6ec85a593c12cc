"""Decide whether a group still lives (PROTOCOL D). Pure: state and time in, a verdict and its reason out.

Stuck is not healthy, wrong is not healthy, a broken stream is not dead, and a late watcher has no opinion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from service_chassis.ids import Rank

# How long a rank that announced long work may be silent, at most. Loading CUDA's libraries from a cold disk, or
# capturing a graph, holds the interpreter's lock for longer than any heartbeat; an exit is seen at once all the same.
BUSY_SILENCE_S = 30.0
# When a rank dies, those that wait for it in a collective notice as soon as its exit is seen, or sooner. So long the
# cause may take to be known, before the group is lost without one.
CAUSE_S = 0.3


class Verdict(Enum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # not to be sent new requests, not yet given up
    LOST = "lost"


class Judgement(NamedTuple):
    """A verdict, the rank to blame (None: the group as a whole) and one phrase that follows the rank's name."""

    verdict: Verdict
    rank: Rank | None = None
    reason: str = ""

    def __str__(self) -> str:
        who = "the group" if self.rank is None else f"rank {self.rank}"
        return f"{who} {self.reason}" if self.reason else self.verdict.value


@dataclass(slots=True)
class BusyState:
    """Long work that a rank announced."""

    what: str
    for_s: float
    up_to_s: float


@dataclass(slots=True)
class RankState:
    """What is known of one rank. Times are the watcher's own; durations ending in ``_for_s`` are the rank's."""

    rank: Rank
    heard_steps_at: float | None = None  # None: not expected to speak there yet
    heard_health_at: float | None = None
    accepted: int = 0
    accepted_at: float = 0.0  # when ``accepted`` last moved
    completed: int = 0
    completed_at: float = 0.0  # when ``completed`` last moved
    running_step: int = 0
    running_for_s: float = 0.0
    busy: BusyState | None = None
    # Facts, each a phrase that follows the rank's name. Once set they stay.
    exited: str = ""
    failed: str = ""
    restarted: str = ""
    diverged: str = ""
    # What it said when a collective broke under it, which is another rank's doing; and when.
    left_alone: str = ""
    left_alone_at: float = 0.0


@dataclass(slots=True)
class StepState:
    """The oldest step that is not answered yet."""

    step: int
    sent_at: float
    budget_s: float


@dataclass(slots=True)
class GroupState:
    """All that a verdict depends on. Owned by the worker group; only ``move_clock`` here changes it."""

    ranks: list[RankState]
    heartbeat_timeout_s: float
    step_timeout_s: float
    ticked_at: float  # when the watcher last looked; set when it begins, so that its first absence counts too
    oldest: StepState | None = None
    opinion_from: float = field(default=float("-inf"))


def move_clock(state: GroupState, now: float, tick_s: float) -> float:
    """Note a tick of the watcher, due ``tick_s`` after the last one, and return by how much it was late.

    While the watcher did not run it heard nothing, whatever was said: every last-heard moves by its lateness. After a
    long absence (SIGSTOP, a paused machine) it keeps silent until a full heartbeat timeout has passed, because ranks
    that were paused with it must first speak again.
    """
    late_s = max(0.0, now - state.ticked_at - tick_s)
    state.ticked_at = now
    if not late_s:
        return 0.0
    for rank in state.ranks:
        if rank.heard_steps_at is not None:
            rank.heard_steps_at = min(now, rank.heard_steps_at + late_s)
        if rank.heard_health_at is not None:
            rank.heard_health_at = min(now, rank.heard_health_at + late_s)
        rank.accepted_at = min(now, rank.accepted_at + late_s)
        rank.completed_at = min(now, rank.completed_at + late_s)
    if state.oldest is not None:
        state.oldest.sent_at = min(now, state.oldest.sent_at + late_s)
    # Ticks of a busy machine are late by a little all the time; they must not put a verdict off for ever.
    if late_s > state.heartbeat_timeout_s / 5:
        state.opinion_from = now + state.heartbeat_timeout_s
    return late_s


def verdict(now: float, state: GroupState) -> Judgement:
    """Judge the group. Facts first, whoever watches; then what depends on a punctual watcher."""
    lost = known_loss(state)
    if lost is not None:
        return lost
    if any(rank.left_alone for rank in state.ranks):
        return _left_alone(now, state)
    if now < state.opinion_from:
        return Judgement(Verdict.HEALTHY)
    judgements = [*(_silence(now, state, rank) for rank in state.ranks), *map(_busy, state.ranks), _step(now, state)]
    for wanted in (Verdict.LOST, Verdict.SUSPECT):
        for judgement in judgements:
            if judgement.verdict is wanted:
                return judgement
    return Judgement(Verdict.HEALTHY)


def known_loss(state: GroupState) -> Judgement | None:
    """Return the loss that is a fact and needs no clock, if there is one."""
    for rank in state.ranks:
        fact = rank.exited or rank.failed or rank.restarted or rank.diverged
        if fact:
            return Judgement(Verdict.LOST, rank.rank, fact)
    return None


def _left_alone(now: float, state: GroupState) -> Judgement:
    """Judge a group of which some ranks noticed that another is gone, and nothing says which."""
    first = min((rank for rank in state.ranks if rank.left_alone), key=lambda rank: rank.left_alone_at)
    reason = f"lost a rank: rank {first.rank} {first.left_alone}"
    return Judgement(Verdict.LOST if now - first.left_alone_at >= CAUSE_S else Verdict.SUSPECT, None, reason)


def _silence(now: float, state: GroupState, rank: RankState) -> Judgement:
    limit_s = state.heartbeat_timeout_s
    if rank.busy is not None:
        limit_s = max(limit_s, min(BUSY_SILENCE_S, rank.busy.up_to_s - rank.busy.for_s))
    worst = Judgement(Verdict.HEALTHY)
    for connection, heard_at in (("Steps", rank.heard_steps_at), ("health", rank.heard_health_at)):
        silent_s = 0.0 if heard_at is None else now - heard_at
        if silent_s > limit_s:
            return Judgement(Verdict.LOST, rank.rank, f"was silent on its {connection} connection for {silent_s:.1f} s")
        # One report a second is normal for an idle rank; half the timeout is already strange.
        if silent_s > limit_s / 2:
            reason = f"has been silent on its {connection} connection for {silent_s:.1f} s"
            worst = Judgement(Verdict.SUSPECT, rank.rank, reason)
    return worst


def _busy(rank: RankState) -> Judgement:
    busy = rank.busy
    if busy is None or busy.for_s <= busy.up_to_s:
        return Judgement(Verdict.HEALTHY)
    return Judgement(
        Verdict.LOST, rank.rank, f"was busy with {busy.what} for longer than the {busy.up_to_s:g} s it announced"
    )


def _step(now: float, state: GroupState) -> Judgement:
    """Judge the oldest unanswered step by the rank that has spent least on it, and blame the one that is furthest back.

    The clock runs from when the last rank accepted the step: a rank that waits in a collective for a rank that has not
    begun is not slow.
    """
    oldest = state.oldest
    if oldest is None or any(rank.busy is not None for rank in state.ranks):
        return Judgement(Verdict.HEALTHY)
    behind = [rank for rank in state.ranks if rank.accepted < oldest.step]
    if behind:
        waited_s = now - oldest.sent_at
        # Its stream may be broken and under repair, which is no verdict before silence would be one.
        if waited_s > max(oldest.budget_s, state.heartbeat_timeout_s):
            reason = f"did not accept step {oldest.step} within {waited_s:.1f} s"
            return Judgement(Verdict.LOST, behind[0].rank, reason)
        return Judgement(Verdict.HEALTHY)
    spent = {rank.rank: _spent_on(oldest, rank, now) for rank in state.ranks if rank.completed < oldest.step}
    if not spent:  # every rank is done, only the answer is missing
        answered_late_s = now - max(rank.completed_at for rank in state.ranks)
        if answered_late_s > oldest.budget_s:
            return Judgement(Verdict.LOST, state.ranks[0].rank, f"completed step {oldest.step} but sent no result")
        return Judgement(Verdict.HEALTHY)
    least = min(spent.values())
    blamed = _furthest_behind(oldest.step, [rank for rank in state.ranks if rank.rank in spent])
    subject = "was stuck" if blamed is not None else "was stuck in a collective"
    if least > oldest.budget_s:
        return Judgement(Verdict.LOST, blamed, f"{subject} in step {oldest.step} for {least:.1f} s")
    if least > state.step_timeout_s:
        return Judgement(Verdict.SUSPECT, blamed, f"has run step {oldest.step} for {least:.1f} s")
    return Judgement(Verdict.HEALTHY)


def _spent_on(oldest: StepState, rank: RankState, now: float) -> float:
    if rank.running_step == oldest.step:
        return rank.running_for_s
    if rank.running_step:  # still in an earlier one, whose answer came from another rank
        return 0.0
    # Accepted, all before it done, and yet not on the device: a device thread that does not pick its work up.
    return now - max(rank.accepted_at, rank.completed_at)


def _furthest_behind(step: int, ranks: list[RankState]) -> Rank | None:
    """Return the one rank with the least progress; None if several are equally far, and it is the collective."""
    progress = {rank.rank: (rank.completed, rank.running_step == step) for rank in ranks}
    least = min(progress.values())
    last = [rank for rank, far in progress.items() if far == least]
    return last[0] if len(last) == 1 else None
