"""The communicator of a group's ranks, named by its formation.

One rank needs none; what is kept is the name, so that a later owner can tell a rank inside the formation from one that
was started anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service_chassis.errors import InvalidParameter, NotBuilt


class ProcessGroup(Protocol):
    """What a formed communicator offers to those that hold it."""

    @property
    def formation_id(self) -> str:
        """The name of the formation, also the rendezvous prefix."""

    @property
    def backend(self) -> str:
        """gloo, nccl or none."""

    def abort(self) -> None:
        """Break collectives that are under way, so that the device thread comes back. Any thread, safe twice."""


@dataclass(frozen=True, slots=True)
class LoneProcessGroup:
    """A group of one."""

    formation_id: str
    backend: str = "none"

    def abort(self) -> None:
        """Nothing to break."""


def form_process_group(formation_id: str, rank: int, world_size: int) -> ProcessGroup:
    """Form the communicator of ``world_size`` ranks under ``formation_id``.

    Raises:
        InvalidParameter: the formation has no name, or the rank does not fit the size.
        NotBuilt: there is more than one rank.
    """
    if not formation_id:
        raise InvalidParameter("formation_id", formation_id, "must not be empty")
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidParameter("rank", rank, f"must be in [0, world_size), and world_size is {world_size}")
    if world_size > 1:
        raise NotBuilt("groups of more than one rank are not built yet: world_size must be 1")
    return LoneProcessGroup(formation_id)
