"""Keep groups of the scripted model alive in this process, without doors, as the server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane.assembly import build_engine, build_group
from control_plane.config import ControlPlaneConfig, resolve_auto
from control_plane.engine import Engine
from control_plane.engine_status import GroupView
from control_plane.fleet import Fleet
from control_plane.group.backoff import Backoff
from control_plane.group.batch_snapshot import BatchSnapshot
from control_plane.group.loss import LossReason
from control_plane.group.settings import GroupFacts
from control_plane.group.takeover import Adopted
from control_plane.group.worker_group import WorkerGroup
from control_plane.group_keeper import GroupKeeper, OnGroupLoss
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.text.model_text import load_model_text
from support.faults import is_alive
from support.waiting import until

# Each at its own times, so that a busy machine is no fault and a fault is still seen in time.
CONFIG: dict[str, Any] = {
    "executor": "mp",
    "device": "cpu",
    "num_threads": 1,
    "max_num_seqs": 8,
    "num_kv_blocks": 200,
    "report_interval_s": 0.05,
    "idle_report_interval_s": 0.1,
    "log_level": "warning",
}


def _for_workers(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a control plane cannot tell workers that run already."""
    if config["executor"] == "remote":
        config.pop("num_threads")
    return config


@dataclass
class Kept:
    """One group under a keeper, and what was heard of it."""

    keeper: GroupKeeper
    engines: list[Engine] = field(default_factory=list)  # one a life
    losses: list[tuple[str, float | None]] = field(default_factory=list)  # (reason, next attempt in seconds)
    num_formed_anew: int = 0
    keeping: asyncio.Task[LossReason] | None = None


class RunningFleet:
    """A fleet with its keepers."""

    def __init__(self, models: Sequence[Sequence[str]], policy: OnGroupLoss, max_failures: int, config: Any) -> None:
        """``models`` has for each group the models of its lives; the last is that of all further ones."""
        self.fleet = Fleet()
        self.fleet.expect([str(index) for index in range(len(models))])
        self.groups: list[Kept] = []
        self.pids: set[int] = set()  # of all workers ever seen
        self.directories: set[Path] = set()
        text = load_model_text("scripted")  # all that models of one vocabulary differ in is what happens to them
        self.grammars = GrammarCompiler(lambda: text)
        for index, lives in enumerate(models):
            self._add(index, list(lives), policy, max_failures, config)

    def _add(self, index: int, lives: list[str], policy: OnGroupLoss, max_failures: int, config: Any) -> None:
        def resolved(model: str) -> ControlPlaneConfig:
            asked = ControlPlaneConfig(model=model, **_for_workers({**CONFIG, **config}))
            return resolve_auto(asked, has_gpu=False, on_terminal=False)

        def make_group() -> WorkerGroup:
            model = lives[0] if len(lives) == 1 else lives.pop(0)
            return build_group(resolved(model), model, "", group=index)

        def make_engine(group: WorkerGroup, adopted: Adopted, survivors: BatchSnapshot | None) -> Engine:
            model = group.settings.model
            engine = build_engine(
                resolved(model),
                group,
                adopted.facts,
                load_model_text(model).tokenizer,
                self.fleet.ids,
                adopted=adopted.snapshot,
                survivors=survivors,
                grammars=self.grammars,
            )
            kept.engines.append(engine)
            for rank in group.executor.ranks:
                address, pid = group.executor.describe_rank(rank)
                if pid and not group.executor.outlives_owner:
                    self.pids.add(pid)
                    self.directories.add(Path(address.removeprefix("unix:")).parent)
            return engine

        def on_formed(facts: GroupFacts) -> None:
            kept.num_formed_anew += 1

        keeper = GroupKeeper(
            str(index),
            fleet=self.fleet,
            make_group=make_group,
            make_engine=make_engine,
            on_group_loss=policy,
            backoff=Backoff(max_failures),
            progress=lambda stage, rank, share, detail: None,
            on_lost=lambda reason, retry_in_s: kept.losses.append((reason, retry_in_s)),
            on_formed=on_formed,
        )
        kept = Kept(keeper)
        self.groups.append(kept)

    def view(self, index: int) -> GroupView:
        return self.fleet.status().groups[index]

    def pid(self, index: int, rank: int = 0) -> int:
        """The process of a rank of a group that has an engine."""
        engine = self.view(index).engine
        assert engine is not None
        return engine.ranks[rank].pid

    async def formed_anew(self, index: int, times: int = 1) -> None:
        await until(lambda: self.groups[index].num_formed_anew == times, f"group {index} formed anew", timeout_s=20)

    async def settled(self) -> None:
        """Wait until no group has a row or a block in use."""

        def is_settled() -> bool:
            for view in self.fleet.status().groups:
                if view.engine is None or view.limits is None or view.engine.num_running or view.engine.num_waiting:
                    return False
                free = view.engine.num_free_blocks + view.engine.num_cached_blocks
                if free != view.limits.num_blocks - 1:
                    return False
            return True

        await until(is_settled, "no row and no block in use")


@asynccontextmanager
async def running_fleet(
    *models: str | Sequence[str],
    policy: OnGroupLoss = OnGroupLoss.REFORM,
    max_failures: int = 5,
    **config: Any,
) -> AsyncIterator[RunningFleet]:
    """Form a group for each of ``models``, keep them until the block ends, and see that nothing of them is left."""
    lives = [[model] if isinstance(model, str) else model for model in models]
    running = RunningFleet(lives, policy, max_failures, config)
    await asyncio.gather(*(kept.keeper.start() for kept in running.groups))
    for kept in running.groups:
        kept.keeping = asyncio.create_task(kept.keeper.run())
    try:
        yield running
    finally:
        tasks = [kept.keeping for kept in running.groups if kept.keeping is not None]
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(kept.keeper.end("the test is over") for kept in running.groups))
        await running.grammars.close()
    failures = [
        one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError)
    ]
    assert not failures, failures
    for view in running.fleet.status().groups:
        assert view.engine is None or not (view.engine.num_running or view.engine.num_waiting)
    assert not [pid for pid in running.pids if is_alive(pid)]
    assert not [directory for directory in running.directories if directory.exists()]
