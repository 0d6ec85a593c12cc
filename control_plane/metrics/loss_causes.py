"""Sort losses of groups into a few causes, for counting. The sentence with the rank's name stays in the log."""

from __future__ import annotations

import re

from control_plane.group.loss import LossKind, LossReason

# Behind the name of the rank, or of the group, in the order of the watchdog's own questions.
_CAUSES: tuple[tuple[str, str], ...] = (
    ("exited", r"exited: "),
    ("failed", r"failed|gave an answer|refused|says that|sent the result"),
    ("restarted", r"restarted"),
    ("diverged", r"diverged"),
    ("collective", r"lost a rank"),
    ("silent", r"was silent"),
    ("overdue", r"was busy"),
    ("stuck", r"was stuck|did not accept|completed step \d+ but"),
)
CAUSES = (*(cause for cause, _ in _CAUSES), "fenced", "unproven", "other")


def cause_of(loss: LossReason) -> str:
    """Return one of ``CAUSES``."""
    if loss.kind is not LossKind.LOST:
        return str(loss.kind.value)
    what = re.sub(r"^(?:rank \d+|the group) ", "", loss.reason)
    return next((cause for cause, pattern in _CAUSES if re.match(pattern, what)), "other")
