"""What a server tells the terminal it was started from, while it comes up and goes down. Logs tell it their own way."""

from __future__ import annotations

from dataclasses import dataclass

from service_chassis.ids import Rank


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far one rank is in one stage of forming the group: form, load, profile, allocate, warm up."""

    stage: str
    rank: Rank
    share: float  # in [0, 1]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Requests are accepted."""

    address: str  # where clients connect, with the port that was taken
    model: str  # the preferred served name
    max_model_len: int
    num_blocks: int  # without the null block
    block_size: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """No new requests are accepted; ``reason`` is for people: "SIGTERM", "rank 0 was lost: ..."."""

    reason: str
    num_running: int = 0


Announcement = StageProgress | Ready | Stopping
