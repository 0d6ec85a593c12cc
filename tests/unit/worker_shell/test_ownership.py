from __future__ import annotations

import pytest

from worker_service.ownership import Granted, Grounds, Ownership, RefusalKind, Refused

TICK_S = 0.25
LEASE_S = 3.0


class Clocked:
    """An ownership with a clock that ticks as the rank's does, unless it is told to stand still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ownership = Ownership(self.now, TICK_S)

    def run(self, seconds: float, *, heard_every: float = 0.0) -> None:
        end, next_heard = self.now + seconds, self.now
        while self.now + TICK_S <= end + 1e-9:
            self.now += TICK_S
            self.ownership.tick(self.now)
            if heard_every and self.now >= next_heard:
                self.ownership.heard(self.now)
                next_heard += heard_every

    def stand_still(self, seconds: float) -> None:
        self.now += seconds

    def ask(self, epoch: int, owner: str, *, force: bool = False) -> Granted | Refused:
        return self.ownership.ask(self.now, epoch=epoch, owner_id=owner, owner_address="", force=force, lease_s=LEASE_S)


@pytest.fixture
def clocked() -> Clocked:
    made = Clocked()
    assert made.ask(5, "A") == Granted(5, Grounds.FIRST)
    return made


def refused(verdict: Granted | Refused, kind: RefusalKind) -> bool:
    return isinstance(verdict, Refused) and verdict.kind is kind


def test_epoch_is_granted_once_to_one_owner(clocked: Clocked) -> None:
    assert clocked.ask(5, "A") == Granted(5, Grounds.REPEATED)
    assert refused(clocked.ask(5, "B"), RefusalKind.STALE)
    assert refused(clocked.ask(4, "A"), RefusalKind.STALE)
    assert refused(clocked.ask(5, "B", force=True), RefusalKind.STALE)
    assert clocked.ownership.owner_id == "A"


def test_higher_epoch_goes_to_the_present_owner_at_once(clocked: Clocked) -> None:
    assert clocked.ask(6, "A") == Granted(6, Grounds.SAME_OWNER)


def test_living_owner_keeps_the_rank_unless_forced(clocked: Clocked) -> None:
    clocked.run(60, heard_every=1.0)
    verdict = clocked.ask(6, "B")
    assert refused(verdict, RefusalKind.LEASE_HELD)
    assert clocked.ownership.epoch == 5
    assert clocked.ask(6, "B", force=True) == Granted(6, Grounds.FORCED)


def test_goodbye_frees_the_lease_at_once(clocked: Clocked) -> None:
    clocked.ownership.let_go()
    assert clocked.ask(6, "B") == Granted(6, Grounds.FREE)
    assert refused(clocked.ask(7, "C"), RefusalKind.LEASE_HELD)  # B's own lease is not free


def test_rank_is_orphaned_from_a_lapse_or_a_goodbye_to_the_next_grant(clocked: Clocked) -> None:
    clocked.run(LEASE_S - TICK_S)
    assert not clocked.ownership.orphaned(clocked.now)
    clocked.run(TICK_S)
    assert clocked.ownership.orphaned(clocked.now)
    clocked.ask(6, "B")
    assert not clocked.ownership.orphaned(clocked.now)
    clocked.ownership.let_go()
    assert clocked.ownership.orphaned(clocked.now)
    assert not Ownership(0.0, TICK_S).orphaned(1000.0)  # never owned


def test_address_of_an_owner_that_said_goodbye_is_told_no_more() -> None:
    ownership = Ownership(0.0, TICK_S)
    ownership.ask(0.0, epoch=1, owner_id="A", owner_address="a:1", force=False, lease_s=LEASE_S)
    assert ownership.owner_address == "a:1"
    ownership.let_go()
    assert ownership.owner_address == ""
    ownership.ask(0.0, epoch=2, owner_id="B", owner_address="b:1", force=False, lease_s=LEASE_S)
    assert ownership.owner_address == "b:1"


def test_lease_is_as_long_as_its_owner_asked_for(clocked: Clocked) -> None:
    clocked.ownership.ask(clocked.now, epoch=6, owner_id="A", owner_address="", force=False, lease_s=10.0)
    clocked.run(2 * LEASE_S)
    assert refused(clocked.ask(7, "B"), RefusalKind.LEASE_HELD)
    clocked.run(10.0 - 2 * LEASE_S)
    assert clocked.ask(7, "B") == Granted(7, Grounds.LAPSED)


def test_silence_of_a_lease_lapses_it_and_fences_nobody(clocked: Clocked) -> None:
    clocked.run(LEASE_S - TICK_S)
    assert refused(clocked.ask(6, "B"), RefusalKind.LEASE_HELD)
    clocked.run(TICK_S)
    assert clocked.ownership.lapsed(clocked.now)
    assert clocked.ownership.refusal(5) is None  # A may still speak
    assert clocked.ask(6, "B") == Granted(6, Grounds.LAPSED)
    assert clocked.ownership.refusal(5) is not None


def test_owner_that_speaks_after_a_lapse_holds_the_lease_again(clocked: Clocked) -> None:
    clocked.run(2 * LEASE_S)
    clocked.ownership.heard(clocked.now)
    assert refused(clocked.ask(6, "B"), RefusalKind.LEASE_HELD)


def test_late_watcher_has_no_opinion(clocked: Clocked) -> None:
    # The process is stopped for a minute, and Join is the first thing it sees: A had no chance to be heard.
    clocked.stand_still(60)
    assert refused(clocked.ask(6, "B"), RefusalKind.LEASE_HELD)
    clocked.run(LEASE_S - TICK_S)
    assert refused(clocked.ask(6, "B"), RefusalKind.LEASE_HELD)
    clocked.run(TICK_S)
    assert clocked.ask(6, "B") == Granted(6, Grounds.LAPSED)


def test_small_delays_of_the_watcher_are_not_the_owners_silence(clocked: Clocked) -> None:
    for _ in range(10):
        clocked.stand_still(0.1)
        clocked.run(TICK_S)
    assert clocked.ownership.silent_for(clocked.now) == pytest.approx(10 * TICK_S)


@pytest.mark.parametrize("epoch", [0, 4, 6])
def test_call_with_another_epoch_is_refused(clocked: Clocked, epoch: int) -> None:
    verdict = clocked.ownership.refusal(epoch)
    assert verdict is not None
    assert str(epoch) in verdict.reason


def test_hello_needs_epoch_and_owner(clocked: Clocked) -> None:
    assert clocked.ownership.greets(5, "A") is None
    assert clocked.ownership.greets(5, "B") is not None
    assert clocked.ownership.greets(4, "A") is not None


def test_nothing_is_valid_before_the_first_grant() -> None:
    ownership = Ownership(0.0, TICK_S)
    assert ownership.refusal(0) is not None
    assert not ownership.lapsed(1000.0)
    assert ownership.silent_for(1000.0) == 0.0
