"""Control planes in processes of their own over the same workers, and clients that go on by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from control_plane.announcement import Announcement, Lost, Ready, StageProgress, Stopping
from control_plane.cli.announcements import from_json
from maniple.v1 import admin_pb2, admin_pb2_grpc
from maniple_client import AsyncClient, Chunk, Started
from support.faults import is_alive
from support.remote_ranks import RemoteRanks, remote_ranks
from support.scripted_reference import greedy, seeded
from support.waiting import until

LEASE_S = 1.0
WORLD_SIZE = 2
STEP_S = 0.01
BLOCK_SIZE = 4
NUM_BLOCKS = 1000
MODEL = "scripted:" + json.dumps({"step_time_s": STEP_S, "sampler": "numpy"})
FLAGS = (
    *("--model", MODEL, "--tensor-parallel-size", str(WORLD_SIZE), "--max-num-seqs", "16"),
    *("--block-size", str(BLOCK_SIZE), "--num-kv-blocks", str(NUM_BLOCKS), "--lease-s", str(LEASE_S)),
    *("--report-interval-s", "0.05", "--idle-report-interval-s", "0.1", "--log-level", "info"),
)


class ControlPlane:
    """``maniple control-plane`` in a process, what it announced and when."""

    def __init__(self, name: str, directory: Path, addresses: Sequence[str], *flags: str) -> None:
        self.address = f"unix:{directory}/{name}.sock"
        self._log = (directory / f"{name}.log").open("w+")
        command = [sys.executable, "-m", "control_plane.cli", "control-plane", "--announce", "json"]
        where = ["--listen", self.address, "--worker-addresses", ",".join(addresses)]
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *where, *FLAGS, *flags], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.announced: list[tuple[float, Announcement]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (announcement := from_json(line)) is not None:
                self.announced.append((time.monotonic(), announcement))

    def times(self, kind: type[Announcement], stage: str = "") -> list[float]:
        """When announcements of a kind were heard."""
        return [at for at, one in self.announced if isinstance(one, kind) and stage in ("", getattr(one, "stage", ""))]

    async def heard(
        self, kind: type[Announcement], stage: str = "", *, times: int = 1, timeout_s: float = 60.0
    ) -> float:
        """Wait for the nth announcement of a kind; return when it came."""
        what = f"{kind.__name__} {stage} of {self.address}"
        await until(lambda: len(self.times(kind, stage)) >= times or not self.is_alive, what, timeout_s=timeout_s)
        assert len(self.times(kind, stage)) >= times, f"{what}: ended with {self.process.poll()}: {self.log()[-2000:]}"
        return self.times(kind, stage)[times - 1]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        return bool(self.times(Ready))

    def signal(self, number: signal.Signals) -> float:
        self.process.send_signal(number)
        return time.monotonic()

    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of its log with that event."""
        lines = (json.loads(line) for line in self.log().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == name]

    def client(self, *others: ControlPlane) -> AsyncClient:
        """Return a client that knows this one, and others."""
        return AsyncClient([self.address, *(one.address for one in others)], resume_for_s=15.0)

    async def status(self) -> admin_pb2.GetStatusResponse:
        async with grpc.aio.insecure_channel(self.address) as channel:
            return await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=5)

    async def exit_code(self, within_s: float = 15.0) -> int:
        await until(lambda: not self.is_alive, f"the end of {self.address}", timeout_s=within_s)
        code = self.process.poll()
        assert code is not None
        return code

    def close(self) -> None:
        if self.is_alive:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        self._reader.join(5)
        self._log.close()


class Site:
    """Workers, and control planes over them. Workers must be the same processes when it closes."""

    def __init__(self, ranks: RemoteRanks, directory: Path) -> None:
        self.ranks = ranks
        self.directory = directory
        self.control_planes: list[ControlPlane] = []

    def control_plane(self, name: str, *flags: str) -> ControlPlane:
        one = ControlPlane(name, self.directory, self.ranks.addresses, *flags)
        self.control_planes.append(one)
        return one

    async def owner_and_spare(self, *flags: str) -> tuple[ControlPlane, ControlPlane]:
        """Start one, and, once it is ready, another that waits."""
        owner = self.control_plane("a", *flags)
        await owner.heard(Ready)
        spare = self.control_plane("b", *flags)
        await spare.heard(StageProgress, "wait")
        assert not spare.is_ready
        return owner, spare

    def client(self) -> AsyncClient:
        first, *others = self.control_planes
        return first.client(*others)

    def worker_pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self.ranks.processes.items()}


@asynccontextmanager
async def site(directory: Path, *, world_size: int = WORLD_SIZE, worker_cwd: Path | None = None) -> AsyncIterator[Site]:
    """Start workers; at the end none of them was restarted, and nothing outlives the block."""
    with remote_ranks(world_size, directory=directory, cwd=worker_cwd) as ranks:
        one = Site(ranks, directory)
        pids = one.worker_pids()
        try:
            yield one
        finally:
            for control_plane in one.control_planes:
                control_plane.close()
        assert all(map(is_alive, pids.values())), "a worker ended"
    assert not any(map(is_alive, pids.values()))


class Reading:
    """A client's generation, read as it comes; what it must be is known beforehand."""

    def __init__(
        self,
        client: AsyncClient,
        request_id: str,
        prompt: list[int],
        num_tokens: int,
        *,
        seed: int | None = None,
        stop_at: int = 0,
        **options: Any,
    ) -> None:
        """Ask for ``num_tokens``; with ``stop_at`` one of them, the first of its id, is a stop id."""
        temperature = 0.0 if seed is None else 1.0
        expected = greedy(prompt, num_tokens) if seed is None else seeded(prompt, num_tokens, seed, 0, temperature)
        self.stop_id: int | None = None
        if stop_at:
            place = next(at for at in range(stop_at, num_tokens) if expected.index(expected[at]) == at)
            self.stop_id, expected = expected[place], expected[: place + 1]
            options["stop_token_ids"] = [self.stop_id]
        if seed is not None:
            options["seed"] = seed
        self.request_id, self.prompt, self.expected = request_id, prompt, expected
        self.token_ids: list[int] = []
        self.token_at: list[float] = []
        self.started: Started | None = None
        self.stream = client.generate(
            token_ids=prompt,
            request_id=request_id,
            max_tokens=num_tokens,
            temperature=temperature,
            ignore_eos=True,
            **options,
        )
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            if isinstance(event, Started):
                assert self.started is None, "told twice that it started"
                self.started = event
            elif isinstance(event, Chunk):
                self.token_ids += event.token_ids
                self.token_at += [time.monotonic()] * len(event.token_ids)
                assert self.token_ids == self.expected[: len(self.token_ids)], "missing, repeated or wrong"

    async def has(self, count: int) -> None:
        """Wait until so many tokens came."""
        await until(lambda: len(self.token_ids) >= count or self.task.done(), f"{count} tokens of {self.request_id}")

    async def whole(self) -> Reading:
        """Wait for the end, which must be the one of an undisturbed run."""
        await self.task
        assert self.token_ids == self.expected
        finished = self.stream.transcript.samples[0].finished
        assert finished is not None
        assert finished.num_output_tokens == len(self.expected)
        assert finished.reason == ("stop" if self.stop_id is not None else "length")
        assert finished.matched_token_id == self.stop_id
        assert self.stream.transcript.done is not None
        return self


def prompt_of(number: int, length: int = 23) -> list[int]:
    """A prompt that shares no block with another number's."""
    return [(7 * number + 31 * place) % 255 for place in range(length)]


async def all_free(control_plane: ControlPlane) -> None:
    """Wait until nothing runs or waits and no block is held."""

    async def settled() -> bool:
        (group,) = (await control_plane.status()).groups
        return (
            group.num_running == group.num_waiting == 0
            and group.num_free_blocks + group.num_cached_blocks == NUM_BLOCKS - 1
        )

    deadline = time.monotonic() + 5.0
    while not await settled():
        assert time.monotonic() < deadline, f"blocks are held: {await control_plane.status()}"
        await asyncio.sleep(0.05)


def stop(control_plane: ControlPlane) -> None:
    os.kill(control_plane.process.pid, signal.SIGSTOP)


__all__ = ["Lost", "Reading", "Ready", "Site", "StageProgress", "Stopping", "all_free", "prompt_of", "site"]
