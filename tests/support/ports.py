"""Ports for servers that a test tells where to listen, or starts again where they were."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 10_000
_SOURCE = random.SystemRandom()  # whatever a test seeds: two at once must not choose alike
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, *, consecutive: bool = False) -> list[int]:
    """Return ports that nobody listens on, and that no connection is given for its own end.

    The system hands out the ports of its ephemeral range to connections: one of those may be gone by the time that its
    server listens, or listens again.
    """
    ceiling = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    while True:
        if consecutive:
            first = _SOURCE.randrange(_LOWEST, ceiling - count)
            ports = list(range(first, first + count))
        else:
            ports = _SOURCE.sample(range(_LOWEST, ceiling), count)
        with ExitStack() as held:
            try:
                for port in ports:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return ports
