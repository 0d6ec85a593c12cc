"""``maniple worker`` as people run it: one supervisor, its ranks on consecutive ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class WorkerCommand:
    """The supervisor's process, and through it the ranks'."""

    def __init__(self, listen: str, health_listen: str, num_ranks: int, *flags: str) -> None:
        words = ["worker", "--listen", listen, "--health-listen", health_listen, "--device", "cpu"]
        words += ["--tensor-parallel-size", str(num_ranks), "--log-level", "warning", *flags]
        self._words = words
        self.start()

    def start(self) -> None:
        """Start it, or start it again once it has ended."""
        command = [sys.executable, "-m", "control_plane.cli", *self._words]
        self.process = subprocess.Popen(command, start_new_session=True)

    def rank_pids(self) -> list[int]:
        """The ranks' processes, in their order. One rank is the command's own process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        pids = [int(pid) for pid in children if b"worker_service" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return sorted(pids) or [self.process.pid]

    def kill(self, rank: int) -> None:
        os.kill(self.rank_pids()[rank], signal.SIGKILL)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def worker_processes(listen: str, health_listen: str, num_ranks: int, *flags: str) -> Iterator[WorkerCommand]:
    command = WorkerCommand(listen, health_listen, num_ranks, *flags)
    try:
        yield command
    finally:
        command.end()
