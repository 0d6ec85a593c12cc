"""Count and measure, for whoever asks later. Pure: no clock, no threads, no library.

A ``Metric`` says what a name means; a ``Board`` holds what was counted under it. One thread writes and reads a board.
What is only looked up when somebody asks is made into a ``Reading`` then, and is on no board.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

COUNTER: Literal["counter"] = "counter"
GAUGE: Literal["gauge"] = "gauge"
HISTOGRAM: Literal["histogram"] = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One name. ``text`` is its help, for people."""

    name: str  # of a counter with its _total
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, ascending, without infinity


class Spread(NamedTuple):
    """What a histogram held at one moment: how many were at most each bound, and at most infinity; and their sum."""

    cumulative: tuple[int, ...]
    sum: float


class Reading(NamedTuple):
    """One value of one metric; ``labels`` are the values of the metric's, in their order."""

    name: str
    labels: tuple[str, ...]
    value: float | Spread


@dataclass(slots=True)
class Count:
    """Something that only grows."""

    value: float = 0

    def add(self, number: float = 1) -> None:
        self.value += number


@dataclass(slots=True)
class Distribution:
    """Observations by size."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Note ``value``, as often as it was seen."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def spread(self) -> Spread:
        """Return what there is now."""
        total, cumulative = 0, []
        for count in self.counts:
            total += count
            cumulative.append(total)
        return Spread(tuple(cumulative), self.sum)


class Board:
    """The counters and histograms of one process."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        """Begin with nothing counted under any of ``metrics``."""
        self.metrics = metrics
        self._counts: dict[tuple[str, tuple[str, ...]], Count] = {}
        self._distributions: dict[tuple[str, tuple[str, ...]], Distribution] = {}

    def count(self, name: str, *labels: str) -> Count:
        """Return the counter of these labels, the same for each call; from the first on it is shown, as 0."""
        metric = self._metric(name, labels, COUNTER)
        return self._counts.setdefault((metric.name, labels), Count())

    def distribution(self, name: str, *labels: str) -> Distribution:
        """Return the histogram of these labels, likewise."""
        metric = self._metric(name, labels, HISTOGRAM)
        return self._distributions.setdefault((metric.name, labels), Distribution(metric.buckets))

    def _metric(self, name: str, labels: tuple[str, ...], kind: str) -> Metric:
        metric = self.metrics[name]
        assert metric.kind == kind, f"{name} is a {metric.kind}"
        assert len(labels) == len(metric.labels), f"{name} has the labels {metric.labels}"
        return metric

    def readings(self) -> list[Reading]:
        """Return all that was counted."""
        counts = [Reading(name, labels, count.value) for (name, labels), count in self._counts.items()]
        return counts + [Reading(name, labels, one.spread()) for (name, labels), one in self._distributions.items()]


def by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Index metrics by their names, which must differ."""
    found: dict[str, Metric] = {}
    for metric in metrics:
        assert metric.name not in found, metric.name
        found[metric.name] = metric
    return found


def doubling(first: float, number: int) -> tuple[float, ...]:
    """Return bounds each twice the one before."""
    return tuple(first * 2**index for index in range(number))
