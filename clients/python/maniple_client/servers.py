"""Keep the servers that a client may talk to, and which of them it talks to now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from maniple.v1 import admin_pb2_grpc, inference_pb2_grpc
from maniple_client.security import Authorized, Tls, Token, check_token_is_safe

Channel = TypeVar("Channel")


class Server(Generic[Channel]):
    """One server: a lazy connection and its calls."""

    def __init__(self, address: str, channel: Channel, token: Token | None, stamp: object) -> None:
        self.address = address
        self.channel = channel
        self.stamp = stamp  # of the files that the connection was made with
        # The stubs are overloaded by the kind of channel; who owns the client knows which kind it is.
        either: Any = channel
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(either)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(either)
        if token is not None:
            self.inference, self.admin = Authorized(self.inference, token), Authorized(self.admin, token)


class Servers(Generic[Channel]):
    """One or several servers of the same model, any of which may take over from another."""

    def __init__(
        self,
        addresses: str | Iterable[str],
        connect: Callable[[str], Channel],
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        is_plaintext: bool = False,
    ) -> None:
        """Take the addresses in order of preference.

        Raises:
            ValueError: there is none, or a token would go to one of them in plaintext.
        """
        given = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not given:
            raise ValueError("at least one address is needed")
        self._connect = connect
        self._tls = tls
        self._token = token
        self._is_plaintext = is_plaintext
        self._retired: list[Channel] = []  # made with files of before; calls on them go on
        self._servers = [self._server(address) for address in dict.fromkeys(given)]
        self._present = 0

    def __len__(self) -> int:
        return len(self._servers)

    def _server(self, address: str) -> Server[Channel]:
        if self._token is not None and self._is_plaintext:
            check_token_is_safe(address)
        stamp = self._tls.stamp() if self._tls else None  # before the files are read: the next look sees more
        return Server(address, self._connect(address), self._token, stamp)

    @property
    def present(self) -> Server[Channel]:
        """The server that is talked to now, on a new connection where certificates were replaced."""
        server = self._servers[self._present]
        if self._tls is not None and self._tls.stamp() != server.stamp:
            try:
                renewed = self._server(server.address)
            except OSError:  # between two versions
                return server
            self._retired.append(server.channel)
            self._servers[self._present] = server = renewed
        return server

    def move(self, address: str, away_from: Server[Channel]) -> None:
        """Talk to the server at ``address`` from now on, or, unless others moved meanwhile, to the next in turn.

        An address that was not given is one that a server named as the owner of a group.
        """
        if address:
            known = [server.address for server in self._servers]
            if address not in known:
                self._servers.append(self._server(address))
                known.append(address)
            self._present = known.index(address)
        elif self._servers[self._present].address == away_from.address:
            self._present = (self._present + 1) % len(self._servers)

    def channels(self) -> list[Channel]:
        """All connections."""
        return [*(server.channel for server in self._servers), *self._retired]
