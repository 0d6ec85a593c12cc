"""The same rows for tests that compare two ways to compute: they come, decode, and go, greedy and drawn."""

from __future__ import annotations

from support.stepper import Stepper
from worker_service.step_work import RowSampling

PROMPTS = {0: [5, 99, 3, 17, 180, 2, 44], 1: [7] * 33, 2: [200, 1], 3: [9, 8, 7], 4: [31, 33]}


SAMPLINGS = {
    1: RowSampling(temperature=0.8, seed=1),
    3: RowSampling(temperature=0.9, top_k=9, seed=3),
}  # others: greedy


def serve(stepper: Stepper) -> list[list[int]]:
    """Return the sampled tokens of each step."""

    def entering(*rows: int) -> list[object]:
        return [stepper.enter(row, PROMPTS[row], sampling=SAMPLINGS.get(row)) for row in rows]

    stepper.submit({0: 7}, new=entering(0))  # type: ignore[arg-type]
    for _ in range(3):
        stepper.submit({0: 1})
    stepper.submit({0: 1, 1: 20}, new=entering(1))  # type: ignore[arg-type]
    stepper.submit({0: 1, 1: 13, 2: 2}, new=entering(2))  # type: ignore[arg-type]
    for _ in range(14):  # over the border of a block
        stepper.submit({0: 1, 1: 1, 2: 1})
    stepper.submit({1: 1, 2: 1}, finished=[0])
    stepper.submit({1: 1, 3: 3, 4: 2}, new=entering(3, 4))  # type: ignore[arg-type]
    stepper.submit({1: 1, 2: 1, 3: 1, 4: 1})
    stepper.submit({0: 7, 1: 1, 2: 1}, new=entering(0))  # type: ignore[arg-type]
    for _ in range(3):
        stepper.submit({0: 1, 1: 1, 2: 1, 3: 1, 4: 1})
    stepper.drain()
    return stepper.tokens()


def parted(one: list[list[int]], other: list[list[int]]) -> int:
    """Return how many sampled tokens differ; what follows a difference differs too."""
    assert [len(step) for step in one] == [len(step) for step in other]
    return sum(a != b for step, twin in zip(one, other, strict=True) for a, b in zip(step, twin, strict=True))
