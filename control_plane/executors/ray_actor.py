"""Hold one rank in a Ray actor: the actor is its place in the cluster, a child process is the rank.

Ray places, watches and counts devices; nothing else goes through it. The rank is the same program as everywhere, and
its process touches nothing of Ray, so neither's threads, signals or locks reach the other. The actor itself never
touches a device.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address, remove_placement_group

from control_plane.executors.worker_settings import WorkerSettings
from service_chassis.child_process import ChildProcess
from service_chassis.ids import Rank


class RankActor:
    """One rank. All methods run on the actor's one event loop."""

    def __init__(
        self, rank: Rank, world_size: int, *, orphan_grace_s: float, linger_s: float, owns_place: bool
    ) -> None:
        """Take the place.

        Args:
            rank: to be held.
            world_size: of the group.
            orphan_grace_s: of the rank.
            linger_s: after the rank ended: long enough to be asked why and to be given another, then the place is free.
            owns_place: the placement group was made for this group of ranks and ends with it.
        """
        self._rank = rank
        self._world_size = world_size
        self._orphan_grace_s = orphan_grace_s
        self._linger_s = linger_s
        self._owns_place = owns_place
        self._child: ChildProcess | None = None
        self._where = ("", "", 0)
        self._lifeline_fd = -1  # closes with this process, and the child goes
        self._lock = asyncio.Lock()

    async def own_place(self) -> Any:
        """Return the placement group that ends with this group of ranks; None in somebody else's."""
        return get_current_placement_group() if self._owns_place else None

    async def start(self, settings: WorkerSettings) -> tuple[str, str, int]:
        """Start the rank unless it runs; return its address, the health server's and its pid.

        One that runs keeps the settings it was started with.

        Raises:
            RuntimeError: it ended before it listened; the text says how.
        """
        async with self._lock:
            if self._child is not None and _has_ended(self._child.pid):
                await self._child.wait()  # nobody told us yet
            if self._child is None or self._child.exit_code is not None:
                self._close_lifeline()
                await self._start(settings)
            return self._where

    async def _start(self, settings: WorkerSettings) -> None:
        host = get_node_ip_address()
        watched_fd, self._lifeline_fd = os.pipe()
        heard_fd, said_fd = os.pipe()
        child = self._child = await ChildProcess.start(
            settings.arguments(
                self._rank,
                self._world_size,
                listen=f"{host}:0",
                health_listen=f"{host}:0",
                orphan_grace_s=self._orphan_grace_s,
                parent_fd=watched_fd,
                announce_fd=said_fd,
            ),
            pass_fds=(watched_fd, said_fd),
            on_exit=self._on_exit,
            prefix=f"[rank {self._rank}] ",
        )
        os.close(watched_fd)
        os.close(said_fd)
        with os.fdopen(heard_fd) as pipe:
            line = await asyncio.to_thread(pipe.readline)  # ends with the child at the latest
        if not line:
            await child.wait()
            raise RuntimeError(f"the process ended before it answered: {child.cause}")
        said = json.loads(line)
        self._where = (said["address"], said["health_address"], said["pid"])

    async def wait_for_end(self) -> tuple[str, tuple[str, ...]]:
        """Return how the rank ended and its last log lines, once it has."""
        assert self._child is not None, "it was started"
        await self._child.wait()
        return self._child.cause, self._child.log_tail

    async def end(self, grace_s: float) -> None:
        """End the rank, by force after ``grace_s``. The caller gives the place back."""
        if self._child is not None:
            await self._child.end(grace_s=grace_s)

    def _on_exit(self, cause: str, log_tail: tuple[str, ...]) -> None:
        asyncio.get_running_loop().call_later(self._linger_s, self._leave)

    def _leave(self) -> None:
        """Give the place back, which ends this process; with a place of its own, the whole group's."""
        if self._child is not None and self._child.exit_code is None:
            return  # started again meanwhile
        place = get_current_placement_group()
        if self._owns_place and place is not None:
            remove_placement_group(place)
        else:
            ray.kill(ray.get_runtime_context().current_actor)

    def _close_lifeline(self) -> None:
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1


def _has_ended(pid: int) -> bool:
    """Look whether a child has ended, and leave it to be waited for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
