"""How a client knows its server, and how it says who it is."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

Token = str | Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files for TLS. They are read for each connection; when they were replaced, new calls use a new connection.

    Attributes:
        ca: who must have signed the server's certificate. Empty: the authorities that the system trusts.
        certificate: to show to the server, with what lies between it and the authority. Empty: none.
        key: its private key.
        server_name: what the server's certificate must be for, where that is not the host of its address.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key belong together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of the files as they are now. Raises ``OSError`` where one cannot be read."""
        ca, key, certificate = (Path(path).read_bytes() if path else None for path in self._paths())
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def options(self) -> list[tuple[str, int | str]]:
        """Return what a channel needs besides."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def stamp(self) -> object:
        """Return what changes when a file is replaced."""
        return tuple(_stamp_of(path) for path in self._paths() if path)

    def _paths(self) -> tuple[str, str, str]:
        return self.ca, self.key, self.certificate


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # between two versions
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def token_in(path: str) -> Callable[[], str]:
    """Return a token that is read from a file for every call, so that it may be replaced at any time."""
    return lambda: Path(path).read_text(encoding="ascii").strip()


def check_token_is_safe(address: str) -> None:
    """Refuse to send a bearer token in plaintext where others can read it.

    Raises:
        ValueError: the address is neither a Unix socket nor on this machine.
    """
    if not _is_private(address):
        raise ValueError(f"a token is not sent to {address} in plaintext: give tls, or a channel of your own")


def _is_private(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Authorized:
    """A stub whose every call carries the token. For either kind of stub."""

    def __init__(self, stub: Any, token: Token) -> None:
        self._stub = stub
        self._token = token

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._stub, method)

        def authorized(request: Any, **options: Any) -> Any:
            token = self._token if isinstance(self._token, str) else self._token()
            return call(request, metadata=(("authorization", f"Bearer {token}"),), **options)

        return authorized
