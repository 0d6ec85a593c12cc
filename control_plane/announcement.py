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
    group: str = ""  # where there are several


@dataclass(frozen=True, slots=True)
class Ready:
    """Requests are accepted."""

    address: str  # where clients connect, with the port that was taken
    model: str  # the preferred served name
    max_model_len: int
    num_blocks: int  # of all groups, without their null blocks
    block_size: int
    client_flags: str = ""  # what a client must say beside the address: the server has TLS, or wants to know callers


@dataclass(frozen=True, slots=True)
class OpenAiReady:
    """The gateway beside us accepts OpenAI clients. Comes again when it was started anew."""

    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A group is gone; ``reason`` names the rank. ``Ready`` comes again when it was formed anew."""

    reason: str
    retry_in_s: float | None  # when it is formed anew; None: it is given up
    group: str = ""  # where there are several


@dataclass(frozen=True, slots=True)
class Stopping:
    """No new requests are accepted; ``reason`` is for people: "SIGTERM", "rank 0 was lost: ..."."""

    reason: str
    num_running: int = 0
    wait_s: float = 0.0  # how long those may take
    again: str = ""  # the signal that, sent once more, ends them at once


Announcement = StageProgress | Ready | OpenAiReady | Lost | Stopping
