"""Ask where this process runs in a Ray cluster, without loading Ray: who runs inside has loaded it already."""

from __future__ import annotations

import sys


def in_placement_group() -> bool:
    """Whether this process is a Ray task or actor inside a placement group."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    from ray.util import get_current_placement_group

    return get_current_placement_group() is not None
