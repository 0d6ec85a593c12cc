"""Run ``maniple serve`` as people do, in a process of its own, and talk to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.announcement import Announcement, Ready
from control_plane.cli.announcements import from_json
from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from support.faults import is_alive
from support.scripted_reference import greedy

A = TypeVar("A", bound=Announcement)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "maniple.v1.InferenceService"


class ServeProcess:
    """The process, what it announced, and how it is reached."""

    def __init__(self, words: Sequence[str], *, verb: str = "serve", log: IO[str] | None = None) -> None:
        command = [sys.executable, "-m", "control_plane.cli", verb, "--announce", "json", "--log-level", "warning"]
        self.process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", *words], stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.announced: list[Announcement] = []
        self._owns_workers = "--worker-addresses" not in words  # else they are others', and outlive it
        self.pids: set[int] = set()  # of every worker that was seen
        self.directories: set[Path] = set()  # with their sockets
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (announcement := from_json(line)) is not None:
                self.announced.append(announcement)

    def heard(self, kind: type[A]) -> list[A]:
        return [one for one in self.announced if isinstance(one, kind)]

    def hear(self, kind: type[A], times: int = 1, *, timeout_s: float = 30.0) -> A:
        """Wait for the nth announcement of a kind."""
        deadline = time.monotonic() + timeout_s
        while len(self.heard(kind)) < times:
            assert time.monotonic() < deadline, f"heard no {kind.__name__}: {self.announced}"
            assert self.process.poll() is None or self._reader.is_alive(), f"it ended: {self.process.poll()}"
            time.sleep(0.01)
        return self.heard(kind)[times - 1]

    @property
    def address(self) -> str:
        return self.hear(Ready).address

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, *, within_s: float = 15.0) -> int:
        code = self.process.wait(within_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        """End it whatever it does, and see that nothing outlives it."""
        self.process.kill()
        self.process.wait(10)
        self._reader.join(5)
        for pid in self.pids:  # one that a test stopped cannot notice that its parent is gone
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 5.0
        while self._owns_workers and (left := [*filter(is_alive, self.pids), *filter(Path.exists, self.directories)]):
            assert time.monotonic() < deadline, f"{left} outlived it"
            time.sleep(0.01)


@contextmanager
def serving(*words: str) -> Iterator[ServeProcess]:
    """Run ``maniple serve`` with these flags until the block ends."""
    server = ServeProcess(words)
    try:
        yield server
    finally:
        server.close()


class Caller:
    """A client of a running server."""

    def __init__(self, server: ServeProcess) -> None:
        self._server = server
        self.channel = grpc.aio.insecure_channel(server.address)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def health(self) -> int:
        status: int = (await self._health.Check(health_pb2.HealthCheckRequest(service=INFERENCE))).status
        return status

    async def status(self) -> admin_pb2.GetStatusResponse:
        status = await self.admin.GetStatus(admin_pb2.GetStatusRequest())
        for rank in (rank for group in status.groups for rank in group.ranks if rank.pid):
            self._server.pids.add(rank.pid)
            self._server.directories.add(Path(rank.address.removeprefix("unix:")).parent)
        return status

    async def healthy(self, wanted: int, *, within_s: float) -> float:
        """Wait for a readiness; return how long it took."""
        began = time.monotonic()
        while await self.health() != wanted:
            assert time.monotonic() - began < within_s, f"readiness is not {wanted} after {within_s} s"
            await asyncio.sleep(0.01)
        return time.monotonic() - began

    def generate(self, request_id: str, prompt: Sequence[int], max_tokens: int, **sampling: object) -> Stream:
        return Stream(self.inference, request_id, prompt, max_tokens, sampling)


class Stream:
    """One generation, read as it comes."""

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceServiceStub,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: dict[str, object],
    ) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.text = ""
        self.finishes: list[inference_pb2.GenerateResponse.Finished] = []
        self.in_band: list[str] = []  # messages of errors
        self.is_done = False
        self.error: grpc.aio.AioRpcError | None = None
        self.token_at = 0.0  # when the last one came
        self.ended_at = 0.0
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=sampling_pb2.SamplingParams(
                **{"temperature": 0.0, "ignore_eos": True, **sampling, "max_tokens": max_tokens}  # type: ignore[arg-type]
            ),
        )
        self._call: Any = stub.Generate(request)
        self.task = asyncio.create_task(self._read(self._call))

    async def _read(self, call: Any) -> None:
        try:
            async for response in call:
                match response.WhichOneof("event"):
                    case "chunk":
                        self.token_ids += response.chunk.token_ids
                        self.token_at = time.monotonic()
                        self.text += response.chunk.text
                    case "finished":
                        self.finishes.append(response.finished)
                    case "done":
                        self.is_done = True
                    case "error":
                        self.in_band.append(response.error.message)
        except grpc.aio.AioRpcError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def cancel(self) -> None:
        """Reset the stream."""
        self._call.cancel()

    async def end(self) -> Stream:
        """Wait for the end, which a cancelled one has by raising."""
        await asyncio.gather(self.task, return_exceptions=self._call.cancelled())
        return self


async def assert_next_server_works(*words: str) -> None:
    """Start another server, have it answer one request, and stop it in good order."""
    with serving(*words) as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            await caller.status()
            prompt = [5, 250, 17, 0, 5]
            again = await caller.generate("r0", prompt, 3).end()
            assert again.token_ids == greedy(prompt, 3)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
