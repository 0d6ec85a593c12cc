"""When a lost group is formed anew, and when it is given up."""

from __future__ import annotations

from control_plane.group.backoff import HEALTHY_AFTER_S, MAX_DELAY_S, Backoff


def test_delays_double_up_to_a_bound_and_end_after_the_allowed_failures() -> None:
    backoff = Backoff(max_failures=9)
    delays = [backoff.failed(float(attempt)) for attempt in range(9)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]
    assert backoff.failed(9.0) is None


def test_a_group_that_was_healthy_for_minutes_begins_the_count_anew() -> None:
    backoff = Backoff(max_failures=2)
    assert [backoff.failed(0.0), backoff.failed(1.0)] == [0.5, 1.0]
    backoff.formed(2.0)
    assert backoff.failed(2.0 + HEALTHY_AFTER_S) == 0.5
    backoff.formed(200.0)
    assert backoff.failed(199.0 + HEALTHY_AFTER_S) == 1.0
    # The life before the last failure counts no more.
    assert backoff.failed(1000.0) is None


def test_no_failure_is_allowed_when_the_limit_is_zero() -> None:
    assert Backoff(max_failures=0).failed(0.0) is None


def test_delay_stays_bounded_however_many_failures_are_allowed() -> None:
    backoff = Backoff(max_failures=10_000)
    assert max(delay for _ in range(5000) if (delay := backoff.failed(0.0)) is not None) == MAX_DELAY_S
