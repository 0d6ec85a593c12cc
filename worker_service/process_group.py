"""What connects the ranks of a group, named by its formation.

One rank needs nothing; what is kept is the name, so that a later owner can tell a rank inside the formation from one
that was started anew. Several ranks are connected by sockets (``socket_group``): enough to agree on tokens, and
without torch. A model whose layers are split brings a communicator for tensors besides (``tensor_group``), formed over
this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from service_chassis.errors import InvalidParameter

OUTPUT_RANK = 0  # decides the sampled tokens
Bytes = bytes | bytearray | memoryview  # of items of one byte


class BrokenCollective(ConnectionError):
    """Another rank is gone, or the group was aborted, while this one waited for the others.

    Where a rank failed, the others fail of this: the cause lies elsewhere.
    """


class ProcessGroup(Protocol):
    """A formed group. Collectives are called by the device thread alone, in the same order on every rank.

    None of them has a timeout: only an owner judges.
    """

    @property
    def formation_id(self) -> str:
        """The name of the formation."""

    @property
    def backend(self) -> str:
        """Sockets or none."""

    @property
    def rank(self) -> int:
        """Place in the group."""

    @property
    def world_size(self) -> int:
        """Ranks of the group."""

    @property
    def num_sharing(self) -> int:
        """Ranks that run on the same cores of the same machine, this one included."""

    @property
    def host(self) -> str:
        """The address at which this rank's machine is reached by the others."""

    def broadcast(self, content: Bytes) -> Bytes:
        """Return what rank 0 gave as ``content``; what others give is not looked at.

        Raises:
            BrokenCollective: a rank is gone, or the group was aborted.
        """

    def gather(self, content: Bytes) -> list[Bytes] | None:
        """Return what every rank gave, in rank order, on rank 0; None elsewhere. Raises ``BrokenCollective``."""

    def barrier(self) -> None:
        """Wait until every rank came here. Raises ``BrokenCollective``."""

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Have ``abort`` call this too."""

    def abort(self) -> None:
        """Break collectives that are under way, here and on the other ranks. Any thread, safe twice, never blocks."""


@dataclass(frozen=True, slots=True)
class LoneProcessGroup:
    """A group of one."""

    formation_id: str
    backend: str = "none"
    rank: int = 0
    world_size: int = 1
    num_sharing: int = 1
    host: str = "127.0.0.1"

    def broadcast(self, content: Bytes) -> Bytes:
        return content

    def gather(self, content: Bytes) -> list[Bytes] | None:
        return [content]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Nothing to break."""

    def abort(self) -> None:
        """Nothing to break."""


def check_formation(formation_id: str, rank: int, world_size: int, rendezvous: str) -> None:
    """Raise ``InvalidParameter`` where the formation has no name or place, or the rank does not fit the size."""
    if not formation_id:
        raise InvalidParameter("formation_id", formation_id, "must not be empty")
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidParameter("rank", rank, f"must be in [0, world_size), and world_size is {world_size}")
    host, _, port = rendezvous.rpartition(":")
    if world_size > 1 and rank != OUTPUT_RANK and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidParameter("rendezvous", rendezvous, "must be host:port, as rank 0 said in its JoinResponse")
