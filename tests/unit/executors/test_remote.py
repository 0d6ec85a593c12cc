"""When a rank that nobody here started counts as ended."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from control_plane.executors import remote
from control_plane.executors.base import RankExit
from control_plane.executors.worker_settings import WorkerSettings
from maniple.v1 import rank_health_pb2
from service_chassis.ids import Rank

R0 = Rank(0)


class BreakingRank:
    """A rank whose health stream breaks at once, or after one report."""

    target = "a:1"

    def __init__(self) -> None:
        self.num_reports = 0

    async def watch_health(self, epoch: int, interval_s: float) -> AsyncIterator[rank_health_pb2.RankReport]:
        for _ in range(self.num_reports):
            yield rank_health_pb2.RankReport()
        raise ConnectionError("broken")


class Watched:
    """An executor that found one rank, and the answers of its ports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refusing: set[str] = set()
        self.exits: list[RankExit] = []
        self.rank = BreakingRank()
        self.executor = remote.RemoteExecutor(["a:1"], world_size=1, settings=WorkerSettings())
        self.executor._reached[R0] = self.rank  # type: ignore[assignment]
        self.executor._health_targets[R0] = "a:2"
        self.executor.subscribe_exit(self.exits.append)

        async def nothing_listens(target: str, *, timeout_s: float) -> bool:
            return target in self.refusing

        monkeypatch.setattr(remote, "nothing_listens", nothing_listens)

    async def watch(self, times: int) -> None:
        for _ in range(times):
            with pytest.raises(ConnectionError, match="broken"):
                async for _ in self.executor.watch_health(R0, 1):
                    pass


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


async def test_broken_stream_is_no_exit(watched: Watched) -> None:
    await watched.watch(10)
    watched.refusing = {"a:2"}  # the health server alone is gone
    await watched.watch(10)
    assert watched.exits == []


async def test_three_refusals_of_both_ports_are_one_exit(watched: Watched) -> None:
    watched.refusing = {"a:1", "a:2"}
    await watched.watch(2)
    assert watched.exits == []
    await watched.watch(5)
    assert watched.exits == [RankExit(R0, "nothing listens at a:1 any more")]


async def test_any_sign_of_life_begins_the_count_anew(watched: Watched) -> None:
    watched.refusing = {"a:1", "a:2"}
    await watched.watch(2)
    watched.rank.num_reports = 1
    await watched.watch(1)
    watched.rank.num_reports = 0
    await watched.watch(1)
    watched.refusing = {"a:1"}
    await watched.watch(1)
    watched.refusing = {"a:1", "a:2"}
    await watched.watch(2)
    assert watched.exits == []


async def test_nothing_is_reported_once_the_end_is_wanted(watched: Watched) -> None:
    watched.refusing = {"a:1", "a:2"}
    watched.executor._reached.clear()
    await watched.executor.shutdown(grace_s=0.0)
    watched.executor._reached[R0] = watched.rank  # type: ignore[assignment]
    await watched.watch(5)
    assert watched.exits == []
