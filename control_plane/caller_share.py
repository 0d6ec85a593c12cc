"""How much of the server one caller may have, so that nobody's requests leave no room for the others'."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.client_errors import QUEUE_RETRY_S
from service_chassis.callers import Caller
from service_chassis.errors import QueueFull


@dataclass(frozen=True, slots=True)
class Held:
    """What one caller has at the moment."""

    num_requests: int = 0  # running and waiting
    num_waiting: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.num_requests + other.num_requests, self.num_waiting + other.num_waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerShare:
    """The limits of every caller whose own entry says nothing else."""

    max_requests: int  # 0: any number
    max_waiting: int

    def check(self, caller: Caller, held: Held) -> None:
        """Raise ``QueueFull`` where one more request is too many. Somebody who is not known has no share."""
        if not caller.identity:
            return
        max_requests = self.max_requests if caller.max_requests is None else caller.max_requests
        max_waiting = self.max_waiting if caller.max_waiting is None else caller.max_waiting
        if max_requests and held.num_requests >= max_requests:
            rule = f"has {held.num_requests} requests, and may have at most {max_requests} at a time"
        elif max_waiting and held.num_waiting >= max_waiting:
            rule = f"has {held.num_waiting} requests waiting, and may have at most {max_waiting}"
        else:
            return
        raise QueueFull(f"caller {caller.identity!r} {rule}", retry_after_s=QUEUE_RETRY_S)
