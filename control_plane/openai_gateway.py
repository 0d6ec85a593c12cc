"""Keep the stock gateway ``smg`` running beside the server: OpenAI's HTTP in front of ``VllmEngine``.

A program of its own in a process of its own, which ends with this one however this one ends. It is a convenience: when
it dies it is started again, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import time
from collections.abc import Callable

from control_plane.announcement import OpenAiReady
from service_chassis.child_process import ChildProcess
from service_chassis.server_address import LOOPBACK
from service_chassis.telemetry import get_logger

log = get_logger()

MISSING = "needs the gateway smg: pip install 'maniple[openai]'"
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 30.0
# Ready for so long, it counts as healthy again.
_HEALTHY_S = 60.0
# Its own grace for connections that are open, and then ours for the process.
_DRAIN_S = 1
_END_S = 4.0


def is_installed() -> bool:
    """Whether the gateway is there."""
    return importlib.util.find_spec("smg") is not None


class OpenAiGateway:
    """One gateway in front of one server. One task runs ``run``."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        server_address: str,
        announce: Callable[[OpenAiReady], None],
        log_level: str = "info",
        log_json: bool = False,
    ) -> None:
        """Take what is needed.

        Args:
            host: where it listens.
            port: the same.
            server_address: HOST:PORT of the server behind it.
            announce: told when clients can connect, each time.
            log_level: ours. Of its own lines that are less than warnings only "debug" shows any: it logs every call.
            log_json: as JSON.
        """
        self._host, self._port = host, port
        self._server_address = server_address
        self._announce = announce
        self._log_arguments = ["--log-level", "debug" if log_level == "debug" else "warn"]
        self._log_arguments += ["--log-json"] if log_json else []
        self._child: ChildProcess | None = None

    async def run(self) -> None:
        """Start it, and start it again whenever it ended, until cancelled; then end it."""
        # The write end closes with this process, however it ends.
        parent_fd, kept_open = os.pipe()
        delay_s = _FIRST_DELAY_S
        try:
            while True:
                started_at = time.monotonic()
                child = await self._start(parent_fd)
                await self._wait_until_ready(child)
                await child.wait()
                if time.monotonic() - started_at >= _HEALTHY_S:
                    delay_s = _FIRST_DELAY_S
                log.error("openai_gateway.exited", cause=child.cause, retry_in_s=delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LAST_DELAY_S)
        finally:
            try:
                if self._child is not None:
                    await self._child.end(grace_s=_END_S)
            finally:
                os.close(kept_open)
                os.close(parent_fd)

    async def _start(self, parent_fd: int) -> ChildProcess:
        arguments = ["-m", "control_plane.openai_gateway_process", str(parent_fd)]
        arguments += ["--worker-urls", f"grpc://{self._server_address}"]
        arguments += ["--host", self._host.strip("[]"), "--port", str(self._port)]
        arguments += ["--shutdown-grace-period-secs", str(_DRAIN_S)]
        # It has no way to serve no metrics; nobody else needs to reach them.
        arguments += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(_free_port())]
        self._child = await ChildProcess.start(
            [*arguments, *self._log_arguments],
            pass_fds=(parent_fd,),
            on_exit=lambda cause, tail: None,
            prefix="openai gateway: ",
        )
        log.info("openai_gateway.started", pid=self._child.pid)
        return self._child

    async def _wait_until_ready(self, child: ChildProcess) -> None:
        """Return once it has found the server behind it, or has ended."""
        while child.exit_code is None:
            if await self._is_ready():
                url = f"http://{self._host}:{self._port}/v1"
                log.info("openai_gateway.ready", url=url, pid=child.pid)
                self._announce(OpenAiReady(url, child.pid))
                return
            await asyncio.sleep(_POLL_S)

    async def _is_ready(self) -> bool:
        host = self._host.strip("[]")
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(_reachable(host), self._port)
                try:
                    writer.write(b"GET /readiness HTTP/1.0\r\nhost: localhost\r\n\r\n")
                    await writer.drain()
                    return (await reader.readline()).split()[1:2] == [b"200"]
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False


def _reachable(host: str) -> str:
    """Return where a server that listens on ``host`` is reached from this machine."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def _free_port() -> int:
    # Another process may take it before the gateway does, which then ends and is started again with another one.
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
