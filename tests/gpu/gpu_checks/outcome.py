"""What a check says. Imports nothing that may be missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
NEEDS_DEVICE = "needs a device"


class NotRun(Exception):
    """Raised by a check, or for it, with what it needs."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A figure that is asked for. On the CPU it is told and judges nothing."""

    name: str
    value: float
    limit: float
    at_most: bool = False  # else at least

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        wanted = f"{'at most' if self.at_most else 'at least'} {self.limit:.0%}"
        return f"{self.name}: {self.value:.1%}, aim {wanted}: {'met' if self.is_met else 'NOT MET'}"


@dataclass(kw_only=True)
class Report:
    """What one check found; filled by it as it goes."""

    facts: dict[str, Any] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)  # parts of it, each with what it needs
    aims: list[Aim] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended."""

    name: str
    status: str
    reason: str = ""
    duration_s: float = 0.0
    report: Report = field(default_factory=Report)

    def as_dict(self) -> dict[str, Any]:
        aims = [
            {"name": aim.name, "value": aim.value, "limit": aim.limit, "at_most": aim.at_most, "met": aim.is_met}
            for aim in self.report.aims
        ]
        return {
            "check": self.name,
            "status": self.status,
            **({"reason": self.reason} if self.reason else {}),
            "duration_s": round(self.duration_s, 2),
            **({"facts": self.report.facts} if self.report.facts else {}),
            **({"not_run": self.report.not_run} if self.report.not_run else {}),
            **({"aims": aims} if aims else {}),
        }


def outcome_of(told: dict[str, Any]) -> Outcome:
    """Read what ``as_dict`` gave."""
    aims = [
        Aim(name=one["name"], value=one["value"], limit=one["limit"], at_most=one["at_most"])
        for one in told.get("aims", [])
    ]
    report = Report(facts=told.get("facts", {}), not_run=told.get("not_run", []), aims=aims)
    return Outcome(
        name=told["check"],
        status=told["status"],
        reason=told.get("reason", ""),
        duration_s=told["duration_s"],
        report=report,
    )
