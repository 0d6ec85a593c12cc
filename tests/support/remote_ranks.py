"""Workers that nobody of the control plane started: what the executor `remote` finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from control_plane.executors.worker_settings import WorkerSettings
from service_chassis.ids import Rank
from support.faults import WORKER
from support.ports import free_ports


class RemoteRanks:
    """Rank processes, by rank, and where each listens."""

    def __init__(self, addresses: Sequence[str], settings: WorkerSettings, cwd: Path | None = None) -> None:
        self.addresses = tuple(addresses)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._settings = settings
        self._cwd = cwd

    def start(self, rank: int, *, rank_said: int | None = None, world_size: int = 0) -> None:
        """Start one rank (again) at its address; it may be told that it is another."""
        address = self.addresses[rank]
        health = f"{address}-health" if address.startswith("unix:") else "127.0.0.1:0"
        words = self._settings.arguments(
            Rank(rank if rank_said is None else rank_said),
            world_size or len(self.addresses),
            listen=address,
            health_listen=health,
            orphan_grace_s=60,
        )
        self.processes[rank] = subprocess.Popen([sys.executable, *words], start_new_session=True, cwd=self._cwd)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait(10)

    def end(self) -> None:
        for rank in self.processes:
            self.kill(rank)


@contextmanager
def remote_ranks(
    world_size: int = 1,
    settings: WorkerSettings = WORKER,
    *,
    directory: Path | None = None,
    cwd: Path | None = None,
    start: bool = True,
) -> Iterator[RemoteRanks]:
    """Start ``world_size`` workers, on Unix sockets in ``directory`` or on TCP ports; end them afterwards.

    Of a machine of their own they can have their working directory, ``cwd``: /proc/self/cwd leads there for them alone.
    """
    if directory is not None:
        addresses = [f"unix:{directory}/r{rank}.sock" for rank in range(world_size)]
    else:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(world_size)]
    ranks = RemoteRanks(addresses, settings, cwd)
    try:
        for rank in range(world_size if start else 0):
            ranks.start(rank)
        yield ranks
    finally:
        ranks.end()
