"""Read where workers are: addresses, or one DNS name that stands for many. Pure, but for the resolving itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

DNS = "dns:///"
UNIX = "unix:"


def address_rule(address: str) -> str:
    """Return what is wrong with one worker address as a phrase, or nothing."""
    if address.startswith(UNIX):
        return "" if len(address) > len(UNIX) else "must be unix:PATH"
    host, _, port = address.removeprefix(DNS).rpartition(":")
    if host and port.isascii() and port.isdecimal() and 0 < int(port) <= 65535:
        return ""
    return f"must be HOST:PORT, {UNIX}PATH or {DNS}NAME:PORT"


def one_per_rank(hosts: Sequence[str], world_size: int) -> tuple[str, ...]:
    """Return an address for every rank, or nothing where they do not fit.

    Fewer addresses than ranks name supervisors, each with the same number of ranks on consecutive ports
    (``maniple worker --tensor-parallel-size``). The order says nothing about ranks: each worker knows its own.
    """
    if not hosts or world_size % len(hosts):
        return ()
    each = world_size // len(hosts)
    if each > 1 and any(host.startswith(UNIX) for host in hosts):
        return ()
    return tuple(next_port(host, offset) for host in hosts for offset in range(each))


def next_port(address: str, offset: int) -> str:
    """Return the address whose port is ``offset`` higher; a Unix socket has none, and only itself."""
    if not offset:
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + offset}"


def beside(target: str, health_address: str) -> str:
    """Return the target of a health server, as its worker at ``target`` described it: ``:port`` is the same host."""
    if not health_address.startswith(":"):
        return health_address
    host = "localhost" if target.startswith(UNIX) else target.rpartition(":")[0]
    return host + health_address


async def resolve(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts that ``addresses`` stand for now, sorted where DNS gave them.

    Raises:
        OSError: a name is not known (yet); the text says which.
    """
    found: list[str] = []
    for address in addresses:
        if not address.startswith(DNS):
            found.append(address)
            continue
        name, _, port = address.removeprefix(DNS).rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(f"{name} cannot be resolved: {error.strerror or error}") from error
        hosts = sorted({(family, str(where[0])) for family, _, _, _, where in infos})
        found += [f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}" for family, host in hosts]
    return tuple(dict.fromkeys(found))


async def nothing_listens(target: str, *, timeout_s: float) -> bool:
    """Ask whether ``target`` refuses connections, as a host does for a process that is gone. Silence is no answer."""
    try:
        async with asyncio.timeout(timeout_s):
            if target.startswith(UNIX):
                _, writer = await asyncio.open_unix_connection(target.removeprefix(UNIX))
            else:
                host, _, port = target.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return False
