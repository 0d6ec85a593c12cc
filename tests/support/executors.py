"""The same ranks behind every executor, for the suite that all four must pass."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from control_plane.executors.base import Executor
from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.executors.ray import RayExecutor
from control_plane.executors.remote import RemoteExecutor
from control_plane.executors.uniproc import UniprocExecutor
from control_plane.executors.worker_settings import WorkerSettings
from support.faults import SETTINGS, WORKER, LiveGroup, is_alive
from support.remote_ranks import remote_ranks
from support.waiting import until

UNI, MP, REMOTE, RAY = "uni", "mp", "remote", "ray"
KINDS = (UNI, MP, REMOTE, RAY)
OF_SEVERAL_RANKS = (MP, REMOTE, RAY)


def pids_of(executor: Executor) -> list[int]:
    """Return the processes of the ranks; `uni` has none."""
    return [pid for rank in executor.ranks if (pid := executor.describe_rank(rank)[1])]


@asynccontextmanager
async def ranks_behind(
    kind: str, world_size: int = 1, *, settings: WorkerSettings = WORKER, workers: WorkerSettings | None = None
) -> AsyncIterator[Callable[[], Executor]]:
    """Yield what makes an executor of one kind; afterwards nothing is left.

    Args:
        kind: of KINDS.
        world_size: ranks.
        settings: what the executor is given.
        workers: what workers are started with that the executor does not start. Default: the same.
    """
    made: list[Executor] = []

    def keep(executor: Executor) -> Executor:
        made.append(executor)
        return executor

    try:
        if kind == UNI:
            yield lambda: keep(UniprocExecutor(settings))
        elif kind == MP:
            yield lambda: keep(MultiprocExecutor(world_size=world_size, settings=settings))
        elif kind == REMOTE:
            with remote_ranks(world_size, workers or settings) as remote:
                yield lambda: keep(RemoteExecutor(remote.addresses, world_size=world_size, settings=settings))
        else:
            name = f"suite-of-{world_size}"
            on_a_node = replace(settings, allow_plaintext_listen=True)
            yield lambda: keep(RayExecutor(name=name, world_size=world_size, settings=on_a_node, linger_s=60.0))
    finally:
        if kind == RAY:
            await _leave_actors(made)
        for executor in made:
            await executor.shutdown(grace_s=2.0)


async def _leave_actors(made: list[Executor]) -> None:
    """End the ranks and leave their actors, which take seconds to start, for the next test."""
    for executor in made:
        executor.let_go()
        pids = pids_of(executor)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await until(lambda pids=pids: not any(map(is_alive, pids)), "the end of the ranks")


@asynccontextmanager
async def formed(
    kind: str, world_size: int = 1, *, workers: WorkerSettings = WORKER, **settings: object
) -> AsyncIterator[LiveGroup]:
    """Yield a formed group behind an executor of one kind; tear it down and assert what is left, and what is not."""
    async with ranks_behind(kind, world_size, settings=workers) as make:
        live = LiveGroup(make(), replace(SETTINGS, **settings))  # type: ignore[arg-type]
        await live.form()
        pids = pids_of(live.executor)
        assert len(pids) == (0 if kind == UNI else world_size)
        try:
            yield live
        finally:
            await live.group.teardown("the test is over")
        assert len(live.losses) <= 1
        if live.executor.outlives_owner and not live.losses:
            assert all(map(is_alive, pids)), "released ranks wait for the next owner"
        else:
            await until(lambda: not any(map(is_alive, pids)), "the end of all ranks", timeout_s=2.0)
