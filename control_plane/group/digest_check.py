"""Compare what ranks report of a step with the control plane's own value of that step (PROTOCOL B7). Pure."""

from __future__ import annotations

from service_chassis.ids import Rank

# Enough for any max_steps_in_flight; a report about an older step is not compared.
_KEPT_STEPS = 256


class DigestCheck:
    """One kind of digest. Values and reports may come in either order."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._expected: dict[int, int] = {}
        self._early: dict[int, list[tuple[Rank, int]]] = {}  # step -> reports that came before the own value

    def expect(self, step: int, value: int) -> tuple[Rank, str] | None:
        """Enter the own value; return the rank that already reported another one, and the phrase that says so."""
        self._expected[step] = value
        while len(self._expected) > _KEPT_STEPS:
            del self._expected[next(iter(self._expected))]
        for rank, reported in self._early.pop(step, ()):
            if reported != value:
                return rank, self._phrase(step, reported, value)
        return None

    def report(self, rank: Rank, step: int, reported: int) -> str:
        """Compare a report; return the phrase that says how it differs, or nothing."""
        value = self._expected.get(step)
        if value is not None:
            return "" if reported == value else self._phrase(step, reported, value)
        if step > max(self._expected, default=-1):
            early = self._early.setdefault(step, [])
            if (rank, reported) not in early:
                early.append((rank, reported))
            while len(self._early) > _KEPT_STEPS:
                del self._early[next(iter(self._early))]
        return ""

    def _phrase(self, step: int, reported: int, value: int) -> str:
        return f"diverged: its {self._what} digest after step {step} is {reported:016x}, not {value:016x}"
