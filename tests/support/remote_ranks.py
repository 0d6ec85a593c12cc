"""Workers that nobody of the control plane started: what the executor `remote` finds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def free_ports(count: int, *, consecutive: bool = False) -> list[int]:
    """Return ports that nobody listens on at this moment."""
    while True:
        probes = [socket.socket() for _ in range(count)]
        try:
            probes[0].bind(("127.0.0.1", 0))
            first = probes[0].getsockname()[1]
            for offset, probe in enumerate(probes[1:], start=1):
                probe.bind(("127.0.0.1", first + offset if consecutive else 0))
            return [probe.getsockname()[1] for probe in probes]
        except (OSError, OverflowError):
            continue
        finally:
            for probe in probes:
                probe.close()


class RemoteRanks:
    """Rank processes, by rank, and where each listens."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self.processes: list[subprocess.Popen[bytes]] = []

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(number)

    def start(self, rank: int, *flags: str) -> None:
        """Start one rank anew at its address."""
        address = self.addresses[rank]
        health = f"{address}-health" if address.startswith("unix:") else "127.0.0.1:0"
        words = [
            *(sys.executable, "-m", "worker_service", "--listen", address, "--health-listen", health),
            *("--rank", str(rank), "--world-size", str(len(self.addresses)), "--device", "cpu"),
            *("--log-level", "warning", "--report-interval-s", "0.05", "--idle-report-interval-s", "0.1", *flags),
        ]
        process = subprocess.Popen(words, start_new_session=True)
        self.processes[rank : rank + 1] = [process]

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)


@contextmanager
def remote_ranks(world_size: int = 1, *flags: str, directory: Path | None = None) -> Iterator[RemoteRanks]:
    """Start ``world_size`` workers, on Unix sockets in ``directory`` or on TCP ports; end them afterwards."""
    if directory is not None:
        addresses = [f"unix:{directory}/r{rank}.sock" for rank in range(world_size)]
    else:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(world_size)]
    ranks = RemoteRanks(addresses)
    try:
        for rank in range(world_size):
            ranks.start(rank, *flags)
        yield ranks
    finally:
        ranks.end()


def wait_for_exit(pid: int, within_s: float) -> None:
    """Wait until a process that is no child of ours has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} lives after {within_s} s")
