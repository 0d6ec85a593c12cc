"""The servers of a control plane: for clients, perhaps one for administration, perhaps one for probes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

import grpc

from control_plane.config import ControlPlaneConfig
from control_plane.security import Security
from service_chassis.auth import AuthInterceptor
from service_chassis.server import bind, make_server
from service_chassis.server_address import is_private
from service_chassis.telemetry import get_logger

log = get_logger()

# A probe sends a name.
_MAX_PROBE_BYTES = 4096


class Listeners:
    """Bound, with nothing served yet; ``start`` begins."""

    def __init__(
        self, config: ControlPlaneConfig, security: Security, interceptors: Sequence[grpc.aio.ServerInterceptor]
    ) -> None:
        """Bind every address; ``interceptors`` come behind the one that knows the caller, before the doors.

        Raises:
            ConfigurationError: one cannot be bound.
        """
        num_streams = config.max_concurrent_streams
        self._paths: list[str] = []  # of Unix sockets
        self._all: list[grpc.aio.Server] = []
        self.doors = make_server(
            config.max_message_bytes,
            interceptors=[AuthInterceptor(security.policy), *interceptors],
            max_concurrent_streams=num_streams,
        )
        self.address = self._bind(self.doors, config.listen, "listen", security)
        self.admin: grpc.aio.Server | None = None
        if config.admin_listen:
            self.admin = make_server(
                config.max_message_bytes,
                interceptors=[AuthInterceptor(security.admin_policy)],
                max_concurrent_streams=num_streams,
            )
            log.info("admin.bound", address=self._bind(self.admin, config.admin_listen, "admin_listen", security))
        self.probe: grpc.aio.Server | None = None
        if config.probe_listen:
            self.probe = make_server(_MAX_PROBE_BYTES, max_concurrent_streams=num_streams)
            log.info("probe.bound", address=self._bind(self.probe, config.probe_listen, "probe_listen", None))

    def _bind(self, server: grpc.aio.Server, address: str, field: str, security: Security | None) -> str:
        # Administration on the loopback is in plaintext: nobody else sees it, and no certificate is for that name.
        in_plaintext = security is None or (field == "admin_listen" and is_private(address))
        bound = bind(server, address, field, tls=None if security is None or in_plaintext else security.tls)
        self._all.append(server)
        if address.startswith("unix:"):
            self._paths.append(address.removeprefix("unix:"))
        return bound

    async def start(self) -> None:
        """Serve."""
        await asyncio.gather(*(server.start() for server in self._all))

    async def stop(self, grace_s: float) -> None:
        """End all calls after ``grace_s`` and leave no socket behind."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._all))
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.unlink(path)
