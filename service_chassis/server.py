"""Start a gRPC server the way both services do: options that survive proxies, limits that clients understand."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from service_chassis.errors import ConfigurationError
from service_chassis.interceptors import error_interceptors
from service_chassis.surviving_server import SurvivingServer
from service_chassis.tls import ServerTls

ChannelOptions = list[tuple[str, int]]

# Proxies and clients ping streams that are silent for long, such as those of requests that wait. By its defaults
# a server takes that for abuse and ends the connection, with every request on it, as "too many pings".
_KEEPALIVE: ChannelOptions = [
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def server_options(max_message_bytes: int, *, max_concurrent_streams: int = 0) -> ChannelOptions:
    """Return the options of every server of ours; ``max_concurrent_streams`` of one connection, 0 for any number.

    The transport's own limit lies well above ours: a message over it ends in a RESOURCE_EXHAUSTED that gateways retry
    and that names no rule. Up to it, the interceptors' deserializers answer INVALID_ARGUMENT with the limit in words.
    It is not unlimited, so that one call cannot fill memory.
    """
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", max(4 * max_message_bytes, 64 << 20)),
        ("grpc.max_send_message_length", -1),
        # Two servers on one port would each get some of the connections. A port in use must be an error.
        ("grpc.so_reuseport", 0),
        *([("grpc.max_concurrent_streams", max_concurrent_streams)] if max_concurrent_streams else []),
    ]


def make_server(
    max_message_bytes: int,
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_concurrent_streams: int = 0,
) -> grpc.aio.Server:
    """Return a server with our options and error interceptors; ``interceptors`` run inside those."""
    return SurvivingServer(
        interceptors=[*error_interceptors(max_message_bytes), *interceptors],
        options=server_options(max_message_bytes, max_concurrent_streams=max_concurrent_streams),
    )


def bind(
    server: grpc.aio.Server | grpc.Server, address: str, field: str = "listen", *, tls: ServerTls | None = None
) -> str:
    """Bind ``address`` ("host:port", port 0 for any, or "unix:path") and return it with the port that was given.

    With ``tls`` a port speaks nothing else. A Unix socket never does: its directory says who may connect.

    Raises:
        ConfigurationError: the address cannot be bound, with the reason as a sentence.
    """
    if address.startswith("unix:") and _answers(address.removeprefix("unix:")):
        # grpc would unlink the socket and bind anew: a stale one may go so, a living server's must not.
        raise ConfigurationError([(field, address, "the socket is in use by another process")])
    # Asked before grpc, which says why only in a line of its own on standard error.
    if failure := _bind_failure(address):
        raise ConfigurationError([(field, address, failure)])
    try:
        if tls is None or address.startswith("unix:"):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise ConfigurationError([(field, address, _bind_failure(address) or "cannot be bound")]) from error
    if address.startswith("unix:"):
        return address
    host, _, _ = address.rpartition(":")
    return f"{host}:{port}"


def check_free(address: str, field: str) -> None:
    """Raise ``ConfigurationError`` unless another program could bind ``address`` now."""
    if failure := _bind_failure(address):
        raise ConfigurationError([(field, address, failure)])


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _bind_failure(address: str) -> str:
    """Say why ``address`` cannot be bound, by binding it; nothing where it can. grpc does not say itself."""
    if address.startswith("unix:"):
        return _unix_bind_failure(Path(address.removeprefix("unix:")))
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (ValueError, OSError) as error:
        return f"cannot be resolved: {error}"
    failures = [_failure_of(family, kind, where) for family, kind, _, _, where in found]
    # A name may stand for several addresses: grpc is content with one, but a port in use is an error on any.
    in_use = errno.EADDRINUSE in failures
    if in_use or all(failures):
        return f"port {port} is in use by another process" if in_use else f"cannot be bound: {os.strerror(failures[0])}"
    return ""


def _failure_of(family: int, kind: int, where: tuple[Any, ...]) -> int:
    """Bind one address; return the error number, 0 where it went well."""
    try:
        with socket.socket(family, kind) as probe:
            # As grpc does: connections of an earlier server that linger are no obstacle, one that listens is.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _unix_bind_failure(path: Path) -> str:
    longest = 107  # sun_path, less its terminating zero
    if len(os.fsencode(path)) > longest:
        return f"a socket's path may have at most {longest} bytes"
    if not path.parent.is_dir():
        return f"the directory {path.parent} does not exist"
    if not os.access(path.parent, os.W_OK):
        return f"the directory {path.parent} is not writable"
    if path.exists() and not path.is_socket():
        return "a file that is no socket is in the way"
    return ""
