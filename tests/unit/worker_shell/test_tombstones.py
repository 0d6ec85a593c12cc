from __future__ import annotations

from service_chassis.protocol.logprobs import Logprobs
from worker_service.tombstones import Tombstone, Tombstones

TICK_S = 0.25


def tombstone(number: int) -> Tombstone:
    return Tombstone(request_id=f"r{number}", token_ids=[1, 2], num_prompt_tokens=1)


def names(kept: Tombstones, now: float) -> list[str]:
    return [one.request_id for one, _ in kept.all(now)]


def tick(kept: Tombstones, since: float, until: float, *, orphaned: bool = False) -> None:
    """Expire as a rank does, some times a second."""
    for number in range(1, round((until - since) / TICK_S) + 1):
        kept.expire(since + number * TICK_S, orphaned=orphaned)


def test_tombstones_keep_the_last_and_only_for_a_while() -> None:
    kept = Tombstones(keep_s=60, max_kept=3)
    for number in range(5):
        kept.add(float(number), tombstone(number))
    assert names(kept, 5.0) == ["r2", "r3", "r4"]
    assert [age_s for _, age_s in kept.all(5.0)] == [3.0, 2.0, 1.0]
    kept.expire(63.5)
    assert names(kept, 63.5) == ["r4"]


def test_oldest_lose_their_logprobs_where_there_are_too_many() -> None:
    kept = Tombstones(keep_s=60, max_kept=4, max_logprobs_bytes=100)
    columns = [Logprobs(2, num_unknown=1) for _ in range(6)]  # 20 bytes each
    for number, one in enumerate(columns[:3]):
        kept.add(0.0, tombstone(number), one, one)
    assert kept.logprobs() == [(None, None), (columns[1], columns[1]), (columns[2], columns[2])]
    assert names(kept, 0.0) == ["r0", "r1", "r2"]
    kept.add(1.0, tombstone(3), columns[3])
    kept.add(1.0, tombstone(4))  # one more than are kept
    kept.add(1.0, tombstone(5))
    assert kept.logprobs() == [(columns[2], columns[2]), (columns[3], None), (None, None), (None, None)]
    kept.expire(60.5)
    kept.add(60.5, tombstone(6), Logprobs(2, num_unknown=5))  # as much as may be in all
    assert [output and len(output) for output, _ in kept.logprobs()] == [None, None, None, 5]


def test_tombstones_do_not_age_while_orphaned() -> None:
    kept = Tombstones(keep_s=60)
    kept.expire(100.0)
    kept.add(100.0, tombstone(0))
    tick(kept, 100, 130)
    tick(kept, 130, 180, orphaned=True)
    assert kept.all(180.0)[0][1] == 30.0
    # The next owner has them for what was left when the first fell silent, and not less for the time between the two.
    tick(kept, 180, 209)
    assert names(kept, 209.0) == ["r0"]
    tick(kept, 209, 211)
    assert names(kept, 211.0) == []


def test_rows_buried_before_and_after_an_orphanhood_keep_their_order_and_ages() -> None:
    kept = Tombstones(keep_s=60)
    kept.expire(0.0)
    kept.add(0.0, tombstone(0))
    tick(kept, 0, 10)
    tick(kept, 10, 1000, orphaned=True)
    kept.add(1000.0, tombstone(1))  # a step that was under way when the owner died
    tick(kept, 1000, 1020)
    assert [(one.request_id, age_s) for one, age_s in kept.all(1020.0)] == [("r0", 30.0), ("r1", 20.0)]


def test_wiped_tombstones_are_gone() -> None:
    kept = Tombstones()
    kept.add(0.0, tombstone(0))
    kept.clear()
    assert len(kept) == 0
