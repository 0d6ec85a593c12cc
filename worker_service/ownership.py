"""Decide who owns this rank (PROTOCOL C1, C2). Pure: time comes as an argument, refusals are values with a reason.

A rank grants each epoch once, to one owner. Safety rests on grants alone; the lease only says when a silent owner may
be replaced, and a lapsed lease fences nobody until a grant does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DEFAULT_LEASE_S = 3.0


class Grounds(Enum):
    """Why an epoch was granted."""

    FIRST = "never owned"
    REPEATED = "granted to this owner before"
    SAME_OWNER = "the present owner asked"
    FREE = "the owner said goodbye"
    FORCED = "forced"
    LAPSED = "the owner's lease lapsed"


class RefusalKind(Enum):
    STALE = "stale"  # the epoch is not above the one granted
    LEASE_HELD = "lease held"  # the owner lives


@dataclass(frozen=True, slots=True)
class Granted:
    epoch: int
    grounds: Grounds


@dataclass(frozen=True, slots=True)
class Refused:
    kind: RefusalKind
    reason: str


class Ownership:
    """The grant a rank has given, and the lease that goes with it.

    ``tick`` is called every ``tick_s`` by whoever has the clock. A tick that comes late tells that this process itself
    stood still (stopped, starved, a paused machine): then the silence was ours, and not the owner's.
    """

    def __init__(self, now: float, tick_s: float) -> None:
        self.epoch = 0  # 0: never owned
        self.owner_id = ""
        self.owner_address = ""
        self.lease_s = DEFAULT_LEASE_S
        self._free = False  # HANDOVER or RELEASE was said
        self._last_heard = now
        self._no_lapse_before = now
        self._last_tick = now
        self._tick_s = tick_s

    def ask(
        self, now: float, *, epoch: int, owner_id: str, owner_address: str, force: bool, lease_s: float
    ) -> Granted | Refused:
        """Grant ``epoch`` to ``owner_id``, or say why not. A refusal changes nothing."""
        self.tick(now)
        if epoch == self.epoch and owner_id == self.owner_id and epoch > 0:
            return Granted(epoch, Grounds.REPEATED)  # its answer was lost on the way
        if epoch <= self.epoch:
            return Refused(RefusalKind.STALE, f"epoch {epoch} is not above {self.epoch}, which is granted")
        grounds = self._grounds(now, owner_id, force)
        if grounds is None:
            left = self.lapses_in(now)
            reason = f"the owner of epoch {self.epoch} holds the lease, which lapses in {left:.1f} s of silence"
            return Refused(RefusalKind.LEASE_HELD, reason)
        self.epoch, self.owner_id, self.owner_address, self.lease_s = epoch, owner_id, owner_address, lease_s
        self._free = False
        self._last_heard = self._no_lapse_before = now
        return Granted(epoch, grounds)

    def _grounds(self, now: float, owner_id: str, force: bool) -> Grounds | None:
        if self.epoch == 0:
            return Grounds.FIRST
        if owner_id == self.owner_id:
            return Grounds.SAME_OWNER
        if self._free:
            return Grounds.FREE
        if self.lapsed(now):
            return Grounds.LAPSED
        return Grounds.FORCED if force else None

    def refusal(self, epoch: int) -> Refused | None:
        """Say why a call with ``epoch`` may not change this rank, or None where it may."""
        if epoch == self.epoch and epoch > 0:
            return None
        granted = f"epoch {self.epoch} is granted" if self.epoch else "none is granted"
        return Refused(RefusalKind.STALE, f"epoch {epoch} is not valid here: {granted}")

    def greets(self, epoch: int, owner_id: str) -> Refused | None:
        """Say why a Hello is refused, or None: only the granted epoch's one owner may open a stream."""
        refused = self.refusal(epoch)
        if refused is None and owner_id != self.owner_id:
            return Refused(RefusalKind.STALE, f"epoch {epoch} is granted to another owner")
        return refused

    def heard(self, now: float) -> None:
        """Note a message with the owner's epoch on Steps. Nothing else renews the lease."""
        self._last_heard = max(self._last_heard, now)

    def let_go(self) -> None:
        """Note that the owner left on purpose: the lease is free at once."""
        self._free = True
        self.owner_address = ""

    def orphaned(self, now: float) -> bool:
        """Say whether the rank had an owner and nobody holds it now."""
        return self.epoch > 0 and (self._free or self.lapsed(now))

    def tick(self, now: float) -> None:
        """Note that time passes. See the class."""
        late = now - self._last_tick - self._tick_s
        self._last_tick = now
        if late <= 0:
            return
        self._last_heard += late
        if late > self._tick_s:
            self._no_lapse_before = now + self.lease_s

    def silent_for(self, now: float) -> float:
        """Return the seconds since the owner was last heard, our own absences not counted."""
        return max(0.0, now - self._last_heard) if self.epoch else 0.0

    def lapses_in(self, now: float) -> float:
        """Return the seconds of silence after which another owner may have the rank."""
        return max(0.0, self._last_heard + self.lease_s - now, self._no_lapse_before - now)

    def lapsed(self, now: float) -> bool:
        """Say whether the owner was silent for the whole lease."""
        return self.epoch > 0 and self.lapses_in(now) == 0.0
