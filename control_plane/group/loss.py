"""Say how a group ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from control_plane.group.batch_snapshot import BatchSnapshot
from service_chassis.ids import Rank


class LossKind(Enum):
    """What the requests of the group are told."""

    LOST = "lost"  # a rank is gone, stuck or wrong
    FENCED = "fenced"  # another owner holds the epoch: touch nothing
    UNPROVEN = "unproven"  # no rank could say whether we still hold it: another owner may go on with the requests


@dataclass(frozen=True, slots=True)
class LossReason:
    """Why a group was lost. ``reason`` is a whole sentence that names the rank."""

    rank: Rank | None
    reason: str
    kind: LossKind = LossKind.LOST
    owner_address: str = ""  # where the owner that fenced us answers clients, if a rank said so


class GroupNotFormed(Exception):
    """A group could not be formed, and nothing of it is left."""

    def __init__(self, loss: LossReason, survivors: BatchSnapshot | None = None) -> None:
        """Take the loss and, where a batch was to be taken over, what a survivor still knew of it."""
        super().__init__(loss.reason)
        self.loss = loss
        self.survivors = survivors
        self.were_dismissed = False  # the ranks were told to leave, and whoever runs them starts them anew
        self.began_nothing = False  # a rank that others own or run went out of reach before it was ours
