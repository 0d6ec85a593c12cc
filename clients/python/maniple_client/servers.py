"""Keep the servers that a client may talk to, and which of them it talks to now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from maniple.v1 import admin_pb2_grpc, inference_pb2_grpc

Channel = TypeVar("Channel")


class Server(Generic[Channel]):
    """One server: a lazy connection and its calls."""

    def __init__(self, address: str, channel: Channel) -> None:
        self.address = address
        self.channel = channel
        # The stubs are overloaded by the kind of channel; who owns the client knows which kind it is.
        either: Any = channel
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(either)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(either)


class Servers(Generic[Channel]):
    """One or several servers of the same model, any of which may take over from another."""

    def __init__(self, addresses: str | Iterable[str], connect: Callable[[str], Channel]) -> None:
        """Take the addresses in order of preference."""
        given = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not given:
            raise ValueError("at least one address is needed")
        self._connect = connect
        self._servers = [Server(address, connect(address)) for address in dict.fromkeys(given)]
        self._present = 0

    def __len__(self) -> int:
        return len(self._servers)

    @property
    def present(self) -> Server[Channel]:
        """The server that is talked to now."""
        return self._servers[self._present]

    def move(self, address: str, away_from: Server[Channel]) -> None:
        """Talk to the server at ``address`` from now on, or, unless others moved meanwhile, to the next in turn.

        An address that was not given is one that a server named as the owner of a group.
        """
        if address:
            known = [server.address for server in self._servers]
            if address not in known:
                self._servers.append(Server(address, self._connect(address)))
                known.append(address)
            self._present = known.index(address)
        elif self.present is away_from:
            self._present = (self._present + 1) % len(self._servers)

    def channels(self) -> list[Channel]:
        """All connections."""
        return [server.channel for server in self._servers]
