from __future__ import annotations

import pytest

from control_plane.group.watchdog import (
    BusyState,
    GroupState,
    RankState,
    StepState,
    Verdict,
    known_loss,
    move_clock,
    verdict,
)
from service_chassis.ids import Rank

T0 = 1000.0


def group(num_ranks: int = 2, *, heard: float = T0, **facts: object) -> GroupState:
    ranks = [RankState(Rank(rank), heard_steps_at=heard, heard_health_at=heard) for rank in range(num_ranks)]
    times = {"heartbeat_timeout_s": 5.0, "step_timeout_s": 10.0, "ticked_at": T0}
    return GroupState(ranks=ranks, **(times | facts))  # type: ignore[arg-type]


def run_step(state: GroupState, step: int, *, budget_s: float = 10.0, sent_at: float = T0) -> None:
    state.oldest = StepState(step, sent_at, budget_s)
    for rank in state.ranks:
        rank.accepted, rank.completed, rank.running_step = step, step - 1, step
        rank.accepted_at = rank.completed_at = sent_at


def test_verdict_is_healthy_when_all_speak() -> None:
    assert verdict(T0 + 1.0, group()).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("fact", ["exited", "failed", "restarted", "diverged"])
def test_verdict_is_lost_at_once_and_names_the_rank_when_a_fact_is_known(fact: str) -> None:
    state = group(opinion_from=T0 + 100)  # facts need no punctual watcher
    setattr(state.ranks[1], fact, "exited: killed by SIGKILL")
    judgement = verdict(T0, state)
    assert (judgement.verdict, judgement.rank) == (Verdict.LOST, 1)
    assert str(judgement) == "rank 1 exited: killed by SIGKILL"


def test_cause_is_blamed_when_a_collective_broke_under_another_rank() -> None:
    state = group(3, opinion_from=T0 + 100)
    state.ranks[0].left_alone, state.ranks[0].left_alone_at = "failed in step 7: BrokenCollective: no peer", T0
    assert verdict(T0 + 0.29, state).verdict is Verdict.SUSPECT
    assert known_loss(state) is None
    state.ranks[2].exited = "exited: killed by SIGKILL"
    assert verdict(T0 + 0.29, state) == (Verdict.LOST, 2, "exited: killed by SIGKILL")


def test_group_is_lost_without_a_culprit_when_none_shows_up_after_a_collective_broke() -> None:
    state = group(3)
    state.ranks[1].left_alone, state.ranks[1].left_alone_at = "failed in step 7: BrokenCollective: no peer", T0
    judgement = verdict(T0 + 0.31, state)
    assert (judgement.verdict, judgement.rank) == (Verdict.LOST, None)
    assert str(judgement) == "the group lost a rank: rank 1 failed in step 7: BrokenCollective: no peer"


@pytest.mark.parametrize("connection", ["steps", "health"])
def test_rank_is_lost_when_one_connection_is_silent_for_the_timeout_though_the_other_speaks(connection: str) -> None:
    state = group()
    for rank in state.ranks:
        rank.heard_steps_at = rank.heard_health_at = T0 + 5.0
    setattr(state.ranks[1], f"heard_{connection}_at", T0)
    assert verdict(T0 + 5.0, state).verdict is Verdict.SUSPECT  # not yet more than the timeout
    judgement = verdict(T0 + 5.01, state)
    assert (judgement.verdict, judgement.rank) == (Verdict.LOST, 1)
    assert "silent" in judgement.reason


def test_rank_is_suspect_when_silent_for_half_the_timeout() -> None:
    judgement = verdict(T0 + 2.6, group())
    assert (judgement.verdict, judgement.rank) == (Verdict.SUSPECT, 0)


def test_rank_has_no_silence_before_it_is_expected_to_speak() -> None:
    state = group()
    for rank in state.ranks:
        rank.heard_steps_at = rank.heard_health_at = None
    assert verdict(T0 + 1e6, state).verdict is Verdict.HEALTHY


def test_watcher_has_no_opinion_for_a_full_timeout_when_it_was_stopped() -> None:
    state = group()
    late_s = move_clock(state, T0 + 20.1, 0.1)  # SIGSTOP for 20 s
    assert late_s == pytest.approx(20.0)
    assert state.ranks[0].heard_steps_at == pytest.approx(T0 + 20.0)
    for now in (T0 + 20.1, T0 + 22.0, T0 + 25.0):
        assert verdict(now, state).verdict is Verdict.HEALTHY
    # A rank that does not speak again after that is lost, so the pause hides nothing for ever.
    assert verdict(T0 + 25.2, state).verdict is Verdict.LOST


def test_step_clock_gives_no_verdict_when_the_watcher_was_stopped() -> None:
    state = group()
    run_step(state, 7)
    for rank in state.ranks:
        rank.running_for_s = 20.0
    move_clock(state, T0 + 20.0, 0.1)
    assert verdict(T0 + 20.0, state).verdict is Verdict.HEALTHY


def test_small_lateness_moves_last_heard_and_still_allows_a_verdict() -> None:
    state = group(1)
    now = T0
    while verdict(now, state).verdict is not Verdict.LOST:
        now += 0.15  # each tick is 50 ms late, as on a busy machine
        move_clock(state, now, 0.1)
        assert now < T0 + 20
    assert now - T0 > 5.0  # the time the watcher did not watch does not count
    assert now - T0 < 8.0


def test_last_heard_never_moves_into_the_future() -> None:
    state = group()
    state.ranks[0].heard_steps_at = T0 + 20.0  # read before the late tick ran
    move_clock(state, T0 + 20.0, 0.1)
    assert state.ranks[0].heard_steps_at == T0 + 20.0


def test_step_is_lost_by_the_smallest_running_for_when_over_its_budget() -> None:
    state = group(heard=T0 + 100)
    run_step(state, 7, budget_s=12.0)
    state.ranks[0].running_for_s, state.ranks[1].running_for_s = 60.0, 11.0
    judgement = verdict(T0 + 100, state)
    assert judgement.verdict is Verdict.SUSPECT  # longer than step_timeout_s, not yet its budget
    state.ranks[1].running_for_s = 12.1
    judgement = verdict(T0 + 100, state)
    assert judgement.verdict is Verdict.LOST
    assert judgement.rank is None
    assert judgement.reason == "was stuck in a collective in step 7 for 12.1 s"


def test_step_blames_the_rank_with_the_least_progress() -> None:
    state = group(heard=T0 + 100)
    run_step(state, 7)
    state.ranks[0].running_for_s = 30.0
    state.ranks[1].running_step = 0  # accepted, and its device never began
    judgement = verdict(T0 + 100, state)
    assert (judgement.verdict, judgement.rank) == (Verdict.LOST, 1)


def test_step_clock_does_not_run_before_the_last_rank_accepted() -> None:
    state = group(heard=T0 + 9.0)
    run_step(state, 7)
    state.ranks[0].running_for_s = 9.0
    state.ranks[1].accepted, state.ranks[1].running_step = 6, 0
    assert verdict(T0 + 9.0, state).verdict is Verdict.HEALTHY
    judgement = verdict(T0 + 10.1, state)
    assert (judgement.verdict, judgement.rank) == (Verdict.LOST, 1)
    assert "did not accept step 7" in judgement.reason


def test_output_rank_is_lost_when_all_completed_and_no_result_came() -> None:
    state = group(heard=T0 + 11)
    run_step(state, 7)
    for rank in state.ranks:
        rank.completed, rank.running_step, rank.completed_at = 7, 0, T0
    assert verdict(T0 + 10, state).verdict is Verdict.HEALTHY
    judgement = verdict(T0 + 11, state)
    assert (judgement.verdict, judgement.rank) == (Verdict.LOST, 0)


def test_busy_rank_stops_the_step_clock_until_its_bound() -> None:
    state = group(heard=T0 + 50)
    run_step(state, 7)
    for rank in state.ranks:
        rank.running_for_s = 50.0
    state.ranks[0].busy = BusyState("wake", for_s=50.0, up_to_s=60.0)
    assert verdict(T0 + 50, state).verdict is Verdict.HEALTHY
    state.ranks[0].busy.for_s = 60.5
    judgement = verdict(T0 + 50, state)
    assert (judgement.verdict, judgement.rank) == (Verdict.LOST, 0)
    assert "wake" in judgement.reason


@pytest.mark.parametrize(("for_s", "limit_s"), [(0.0, 30.0), (1780.0, 20.0), (1799.0, 5.0)])
def test_busy_rank_may_be_silent_for_longer_but_never_beyond_its_bound(for_s: float, limit_s: float) -> None:
    state = group(1)
    state.ranks[0].busy = BusyState("load", for_s=for_s, up_to_s=1800.0)
    assert verdict(T0 + limit_s - 0.1, state).verdict is not Verdict.LOST
    assert verdict(T0 + limit_s + 0.1, state).verdict is Verdict.LOST


def test_verdict_changes_nothing() -> None:
    state = group()
    run_step(state, 3)
    before = repr(state)
    verdict(T0 + 60, state)
    assert repr(state) == before
