"""Say which devices there may be, and which of them ranks can take: ``--device-ids 0,2``."""

from __future__ import annotations

from collections.abc import Sequence

# What --device may name besides auto.
KINDS = ("cpu", "cuda", "rocm", "xpu")
_LAST_ID = 1023


def device_ids_rule(ids: Sequence[int]) -> str:
    """Return the rule that ``ids`` break, or nothing. Whether there are such devices is seen where they are."""
    if any(not 0 <= one <= _LAST_ID for one in ids):
        return f"must each be in [0, {_LAST_ID}]"
    return "must differ: a device has one rank" if len(set(ids)) < len(ids) else ""


def ids_fit_rule(num_ids: int, num_ranks: int) -> str:
    """Return the rule that so many ids break where so many ranks run, or nothing."""
    if num_ids in (0, num_ranks):
        return ""
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "one rank"
    return f"must be as many as the ranks here: {num_ids} for {ranks}"
