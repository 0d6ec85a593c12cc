"""How scheduling can be stopped while the server stays up, and what becomes of requests meanwhile."""

from __future__ import annotations

from enum import Enum


class PauseMode(Enum):
    """What happens to requests. The latest word counts: another mode may follow while one is in force."""

    ABORT = "abort"  # those that are here end with finish reason abort, new ones are refused
    WAIT = "wait"  # those that are here finish, new ones are refused
    KEEP = "keep"  # those that are here freeze, new ones queue behind them


# What clients and operators are told.
PAUSE_REASONS = {
    PauseMode.ABORT: "paused",
    PauseMode.WAIT: "paused, requests that are here may finish",
    PauseMode.KEEP: "paused, requests are kept until generation is resumed",
}
