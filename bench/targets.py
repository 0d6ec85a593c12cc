"""What faults are done to: our server with workers as its children, with workers elsewhere, and vLLM."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import shlex
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from doors import OpenAiDoor
from maniple_client import AsyncClient, Chunk
from processes import Started, Surroundings, is_alive, title_of, tree, until

NUM_STREAMS = 8
READY_TIMEOUT_S = 600.0
_PORTS = random.SystemRandom()  # whatever a program seeds: two at once must not choose alike
_SERVICE = "maniple.v1.InferenceService"
_WORKER_OF_VLLM = re.compile(r"VLLM::Worker_TP(\d+)|VLLM::Worker")


@dataclass
class StreamLog:
    """What one client saw."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    token_at: float = 0.0
    ended_at: float = 0.0  # 0: it still runs
    num_ends: int = 0
    error: str = ""


class Target(Protocol):
    """A running server that faults can be done to."""

    name: str

    async def start(self) -> None:
        """Start everything and wait until requests are accepted."""

    @property
    def main(self) -> Started:
        """The process that clients talk to."""

    async def rank_pids(self) -> list[int]:
        """Return the processes of the ranks, in rank order."""

    async def is_ready(self) -> bool:
        """Whether it says that it accepts requests; False where nobody answers."""

    async def stream(self, log: StreamLog, max_tokens: int) -> None:
        """Run one request and write down what comes. Raises what its client raises."""

    async def close(self) -> None:
        """End everything."""


def prompts(vocab_size: int) -> list[list[int]]:
    """Return a prompt for each stream."""
    return [[(7 * number + 3 * place) % vocab_size for place in range(12 + number)] for number in range(NUM_STREAMS)]


class Streams:
    """Eight requests, read at once."""

    def __init__(self, target: Target, vocab_size: int, max_tokens: int) -> None:
        self.logs = [StreamLog(prompt) for prompt in prompts(vocab_size)]
        self._tasks = [asyncio.create_task(self._run(target, log, max_tokens)) for log in self.logs]

    async def _run(self, target: Target, log: StreamLog, max_tokens: int) -> None:
        try:
            await target.stream(log, max_tokens)
        except Exception as error:  # whatever a client raises is its one final status
            log.error = f"{type(error).__name__}: {error}"
        log.num_ends += 1
        log.ended_at = time.monotonic()

    async def all_run(self, num_tokens: int, timeout_s: float = 120.0) -> None:
        """Wait until every stream has so many tokens."""
        await until(lambda: all(log.num_tokens >= num_tokens for log in self.logs), timeout_s, "tokens for everybody")
        if any(log.ended_at for log in self.logs):
            raise RuntimeError(f"a stream ended before the fault: {[log.error for log in self.logs]}")

    async def all_ended(self, timeout_s: float) -> float:
        """Wait until every stream has ended; return when the last one did."""
        _, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
        if pending:
            raise TimeoutError(f"{len(pending)} of {len(self._tasks)} streams did not end within {timeout_s:g} s")
        return max(log.ended_at for log in self.logs)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _OurServer:
    """What both forms of our server share: how clients reach it."""

    def __init__(self, resume_for_s: float) -> None:
        self._client: AsyncClient | None = None
        self._resume_for_s = resume_for_s

    def _connect(self, address: str) -> None:
        self._client = AsyncClient(address, resume_for_s=self._resume_for_s)
        # A connection that broke is tried again at once: readiness is asked every few milliseconds.
        options = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 20)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @property
    def client(self) -> AsyncClient:
        assert self._client is not None, "start() comes first"
        return self._client

    async def rank_pids(self) -> list[int]:
        """See ``Target``."""
        (group,) = (await self.client.status()).groups
        return [rank.pid for rank in group.ranks]

    async def is_ready(self) -> bool:
        """See ``Target``."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def stream(self, log: StreamLog, max_tokens: int) -> None:
        """See ``Target``."""
        async with self.client.generate(
            token_ids=log.prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        ) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    log.token_ids += event.token_ids
                    log.num_tokens += len(event.token_ids)
                    log.token_at = time.monotonic()

    async def _disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()
            await self._channel.close()


class Served(_OurServer):
    """``maniple serve``: the ranks are its children."""

    name = "maniple"

    def __init__(self, around: Surroundings, model: str, ranks: int, *flags: str) -> None:
        super().__init__(resume_for_s=0.0)  # when the first status came is what is measured
        self._around = around
        self._words = maniple(
            *("serve", "--model", model, "--tensor-parallel-size", str(ranks), "--executor", "mp", "--device", "cpu"),
            *("--listen", "127.0.0.1:0", "--announce", "json", "--num-threads", threads_of(ranks), *flags),
        )

    async def start(self) -> None:
        """See ``Target``."""
        self._main = self._around.start(self._words, "serve")
        await until(
            lambda: self.main.events("ready") or self.main.exit_code() is not None, READY_TIMEOUT_S, "readiness"
        )
        if not self.main.events("ready"):
            raise RuntimeError(f"it did not start:\n{self.main.log_tail()}")
        self._connect(self.main.events("ready")[0][1]["address"])

    @property
    def main(self) -> Started:
        """See ``Target``."""
        return self._main

    async def close(self) -> None:
        """See ``Target``."""
        await self._disconnect()
        await self._main.end()


class Elsewhere(_OurServer):
    """``maniple worker`` with its ranks, and control planes that come and go at one address."""

    name = "maniple"

    def __init__(self, around: Surroundings, model: str, ranks: int, *flags: str) -> None:
        super().__init__(resume_for_s=30.0)
        self._around = around
        self._ranks = ranks
        self._address = f"127.0.0.1:{free_ports(1)}"
        first = free_ports(2 * ranks)  # health servers listen behind them
        self._worker_words = maniple(
            *("worker", "--listen", f"127.0.0.1:{first}", "--tensor-parallel-size", str(ranks), "--device", "cpu"),
            *("--num-threads", threads_of(ranks)),
        )
        self._words = maniple(
            *("control-plane", "--model", model, "--tensor-parallel-size", str(ranks), "--listen", self._address),
            *("--worker-addresses", f"127.0.0.1:{first}", "--announce", "json", *flags),
        )
        self._numbers = itertools.count()

    async def start(self) -> None:
        """See ``Target``."""
        self.worker = self._around.start(self._worker_words, "worker")
        self._main = self.start_control_plane()
        await ready(self._main)
        self._connect(self._address)

    def start_control_plane(self) -> Started:
        """Start a control plane at the one address."""
        self._main = self._around.start(self._words, f"control-plane-{next(self._numbers)}")
        return self._main

    @property
    def main(self) -> Started:
        """See ``Target``."""
        return self._main

    async def close(self) -> None:
        """See ``Target``."""
        await self._disconnect()
        await self._main.end()
        await self.worker.end()


class Vllm:
    """``vllm serve`` by a given command, over OpenAI's HTTP."""

    name = "vllm"

    def __init__(self, around: Surroundings, command: str, vocab_size: int) -> None:
        self._around = around
        self._port = free_ports(1)
        self._words = [*shlex.split(command), "--port", str(self._port)]
        self._door = OpenAiDoor(f"http://127.0.0.1:{self._port}", "", vocab_size)

    async def start(self) -> None:
        """See ``Target``."""
        self._main = self._around.start(self._words, "vllm")
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await self.is_ready():
            if self.main.exit_code() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it did not start:\n{self.main.log_tail()}")
            await asyncio.sleep(0.2)
        await self._door.vocab_size()  # finds the model's name

    @property
    def main(self) -> Started:
        """See ``Target``."""
        return self._main

    async def rank_pids(self) -> list[int]:
        """Return its worker processes. They name themselves."""
        titles = {pid: title_of(pid) for pid in tree(self.main.pid)}
        found = {pid: match for pid, title in titles.items() if (match := _WORKER_OF_VLLM.search(title))}
        return sorted(found, key=lambda pid: int(found[pid][1] or 0))

    async def is_ready(self) -> bool:
        """Ask /health. Where the machine is busy it may take a while to answer, which says nothing of its readiness."""
        try:
            async with asyncio.timeout(5.0):
                async for _ in self._door._call("GET", "/health", None):
                    pass
                return True
        except (OSError, TimeoutError, ValueError, IndexError, EOFError):
            return False

    async def stream(self, log: StreamLog, max_tokens: int) -> None:
        """See ``Target``."""
        async for count in self._door.stream(log.prompt, max_tokens):
            log.num_tokens += count
            log.token_at = time.monotonic()

    async def close(self) -> None:
        """See ``Target``."""
        for pid in tree(self.main.pid) if is_alive(self.main.pid) else ():
            if pid != self.main.pid and is_alive(pid):
                os.kill(pid, 9)
        await self._main.end()


async def ready(server: Started) -> float:
    """Wait until a server of ours announces that it is ready; return when it did."""
    await until(lambda: server.events("ready") or server.exit_code() is not None, READY_TIMEOUT_S, "readiness")
    if not server.events("ready"):
        raise RuntimeError(f"it did not start:\n{server.log_tail()}")
    return server.events("ready")[0][0]


def maniple(*words: str) -> list[str]:
    """Return a command of this environment."""
    return [sys.executable, "-m", "control_plane.cli", *words]


def threads_of(ranks: int) -> str:
    """Return the threads of one rank, so that all of them together have the machine's cores."""
    return str(max((os.cpu_count() or 1) // ranks, 1))


def free_ports(count: int) -> int:
    """Return the first of so many consecutive ports that nobody listens on, and that no connection is given.

    A port of the ephemeral range may be some connection's own end by the time that a server listens, or listens again.
    """
    ceiling = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = _PORTS.randrange(10_000, ceiling - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
