"""Workers, control planes and connections that come and go, as an orchestrator and a network have them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from maniple_client import AsyncClient, ManipleError
from processes import Started, Surroundings, children_of, is_alive, until
from targets import free_ports, maniple

RANKS = 2
GROUPS = 2
LEASE_S = 2.0
HEARTBEAT_S = 3.0
MODEL = 'scripted:{"step_time_s": 0.004, "sampler": "numpy"}'


class Proxy:
    """A TCP proxy whose connections can be broken."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(other_writer)
        try:
            await asyncio.gather(self._copy(reader, other_writer), self._copy(other_reader, writer))
        finally:
            for one in (writer, other_writer):
                one.transport.abort()
                self._writers.discard(one)

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        writer.transport.abort()

    def drop(self) -> int:
        """Reset all connections; return how many there were."""
        for writer in list(self._writers):
            writer.transport.abort()
        return len(self._writers)

    async def close(self) -> None:
        self._server.close()
        self.drop()


class World:
    """Two groups of scripted ranks under a supervisor each, two control planes over both, and what happens to them."""

    def __init__(self, source: random.Random) -> None:
        self.around = Surroundings()
        self.faults: list[tuple[float, str]] = []  # when, and of which kind
        self._source = source
        self._processes: dict[str, Started] = {}
        self._commands: dict[str, list[str]] = {}
        self._client_proxies: list[Proxy] = []
        self._step_proxies: list[Proxy] = []
        self._addresses: list[str] = []  # of the control planes, without their proxies
        self._is_closing = False
        self.restarts: Counter[str] = Counter()

    async def start(self) -> AsyncClient:
        """Start everything; return a client that knows both control planes."""
        groups = []
        for group in range(GROUPS):
            first = free_ports(2 * RANKS)
            self._commands[f"worker-{group}"] = maniple(
                *("worker", "--listen", f"127.0.0.1:{first}", "--tensor-parallel-size", str(RANKS), "--device", "cpu"),
                *("--report-interval-s", "0.05", "--idle-report-interval-s", "0.2", "--log-level", "warning"),
            )
            proxies = [Proxy(first + rank) for rank in range(RANKS)]
            groups.append(",".join([f"127.0.0.1:{await proxy.start()}" for proxy in proxies]))
            self._step_proxies += proxies
        addresses = []
        for number in range(2):
            port = free_ports(1)
            proxy = Proxy(port)
            self._addresses.append(f"127.0.0.1:{port}")
            addresses.append(f"127.0.0.1:{await proxy.start()}")
            self._client_proxies.append(proxy)
            self._commands[f"control-plane-{number}"] = maniple(
                *("control-plane", "--model", MODEL, "--listen", f"127.0.0.1:{port}", "--handover"),
                *("--worker-addresses", ";".join(groups), "--tensor-parallel-size", str(RANKS)),
                *("--max-num-seqs", "8", "--num-kv-blocks", "400", "--block-size", "4", "--max-group-failures", "1000"),
                *("--lease-s", str(LEASE_S), "--heartbeat-timeout-s", str(HEARTBEAT_S), "--step-timeout-s", "3"),
                *("--report-interval-s", "0.05", "--idle-report-interval-s", "0.2", "--startup-timeout-s", "30"),
                *("--announce", "json", "--log-level", "warning"),
            )
        for name in self._commands:
            self._start(name)
        self._orchestrator = asyncio.create_task(self._orchestrate())
        await until(lambda: any(one.events("ready") for one in self._processes.values()), 60.0, "readiness")
        return AsyncClient(addresses, resume_for_s=30.0)

    def _start(self, name: str) -> None:
        number = self.restarts[name]
        self._processes[name] = self.around.start(self._commands[name], f"{name}.{number}")

    async def _orchestrate(self) -> None:
        """Start again whatever ended, after a moment, as an orchestrator does."""
        while True:
            for name, process in list(self._processes.items()):
                process.read()
                if process.exit_code() is not None and not self._is_closing:
                    await asyncio.sleep(0.2)
                    self.restarts[name] += 1
                    self._start(name)
            await asyncio.sleep(0.05)

    # Faults

    async def one_fault(self) -> str:
        """Do a random one; return its name."""
        faults: list[tuple[str, float, Callable[[], Awaitable[None]]]] = [
            ("rank killed", 2, self._kill_rank),
            ("control plane killed", 2, self._kill_control_plane),
            ("control plane handed over", 1, self._hand_over),
            ("control plane stopped", 1, self._stop_control_plane),
            ("rank stopped for a moment", 1, self._stop_rank),
            ("client connections dropped", 2, self._drop_client_connections),
            ("worker connections dropped", 2, self._drop_worker_connections),
        ]
        ((name, _, fault),) = self._source.choices(faults, [weight for _, weight, _ in faults])
        self.faults.append((time.monotonic(), name))
        await fault()
        self.faults.append((time.monotonic(), name))
        return name

    def happened(self, within_s: float, *names: str) -> bool:
        """Whether one of these faults happened within the last seconds."""
        since = time.monotonic() - within_s
        return any(at >= since and name in names for at, name in self.faults)

    def _pick(self, kind: str) -> Started | None:
        """Return a living process of one kind."""
        living = [one for name, one in self._processes.items() if name.startswith(kind) and one.exit_code() is None]
        return self._source.choice(living) if living else None

    def _pick_rank(self) -> int | None:
        supervisor = self._pick("worker")
        ranks = sorted(children_of(supervisor.pid)) if supervisor is not None else []
        return self._source.choice(ranks) if ranks else None

    async def _kill_rank(self) -> None:
        if (pid := self._pick_rank()) is not None:
            os.kill(pid, signal.SIGKILL)

    async def _stop_rank(self) -> None:
        """Shorter than any timeout: nothing may come of it but a pause."""
        if (pid := self._pick_rank()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self._source.uniform(0.1, 0.8))
                os.kill(pid, signal.SIGCONT)

    async def _kill_control_plane(self) -> None:
        if (process := self._pick("control-plane")) is not None:
            process.send_signal(signal.SIGKILL)

    async def _hand_over(self) -> None:
        if (process := self._pick("control-plane")) is not None:
            process.send_signal(signal.SIGTERM)

    async def _stop_control_plane(self) -> None:
        """Past its lease or not: it wakes up as a fenced one, or as if nothing had been."""
        if (process := self._pick("control-plane")) is not None:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._source.choice([0.5, LEASE_S + 2.0]))
            process.send_signal(signal.SIGCONT)

    async def _drop_client_connections(self) -> None:
        self._source.choice(self._client_proxies).drop()

    async def _drop_worker_connections(self) -> None:
        self._source.choice(self._step_proxies).drop()

    # The end

    async def is_empty(self) -> str:
        """Wait until every group has an owner and no row or block in use; return what is missing otherwise."""
        deadline = time.monotonic() + 60.0
        while True:
            missing = await self._missing()
            if not missing or time.monotonic() > deadline:
                return missing
            await asyncio.sleep(0.2)

    async def _missing(self) -> str:
        """Ask both control planes: each may own one of the groups, and the other is a spare for it."""
        empty: set[str] = set()
        told: list[str] = []
        for address in self._addresses:
            async with AsyncClient(address) as client:
                try:
                    groups = list((await client.status(timeout_s=2.0)).groups)
                except ManipleError as error:
                    told.append(f"{address}: {error}")
                    continue
            for group in groups:
                num_used = group.num_total_blocks - group.num_free_blocks - group.num_cached_blocks
                if group.state == "ready" and not (group.num_running or group.num_waiting or num_used):
                    empty.add(group.name)
                else:
                    told.append(
                        f"{address}: group {group.name}: {group.state} {group.reason}: {group.num_running} running, "
                        f"{group.num_waiting} waiting, {num_used} blocks in use"
                    )
        return "" if len(empty) == GROUPS else "; ".join(told)

    async def close(self) -> dict[str, list[str]]:
        """End everything; return what is left of it."""
        self._is_closing = True
        self._orchestrator.cancel()
        await asyncio.gather(self._orchestrator, return_exceptions=True)
        # Control planes first: a worker that goes under a living one is a fault.
        for name, process in sorted(self._processes.items()):
            if is_alive(process.pid) or process.exit_code() is None:
                await process.end()
            else:
                await process.end(0.0)
            self.restarts[name] += 0
        for proxy in (*self._client_proxies, *self._step_proxies):
            await proxy.close()
        with suppress(TimeoutError):
            await until(lambda: not any(self.around.left().values()), 10.0, "an empty machine", every_s=0.1)
        return self.around.left()
