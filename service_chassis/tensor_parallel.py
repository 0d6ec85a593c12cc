"""Say over how many ranks a model's layers can be split: the control plane asks early, every worker asks again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Beyond this nobody has ranks; it bounds the search for sizes that work.
_LARGEST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSizes:
    """What a split must respect. Vocabularies may be split unevenly."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int


def read_split_sizes(raw: Mapping[str, Any]) -> SplitSizes | None:
    """Read the sizes from a model's ``config.json``; None where it does not say them in the usual way."""
    num_heads = raw.get("num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads", num_heads)
    intermediate_size = raw.get("intermediate_size")
    for size in (num_heads, num_kv_heads, intermediate_size):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            return None
    assert num_heads is not None
    assert num_kv_heads is not None
    assert intermediate_size is not None
    return SplitSizes(num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=intermediate_size)


def split_rule(sizes: SplitSizes, world_size: int) -> str:
    """Return the rule that a split over ``world_size`` ranks breaks, with the sizes that work; or nothing."""
    broken = _broken(sizes, world_size)
    if not broken:
        return ""
    working = [str(size) for size in range(1, min(sizes.num_heads, _LARGEST) + 1) if not _broken(sizes, size)]
    listed = " or ".join(filter(None, (", ".join(working[:-1]), working[-1])))
    return f"{broken}; this model can be split over {listed} rank{'s' if len(working) > 1 else ''}"


def _broken(sizes: SplitSizes, world_size: int) -> str:
    if sizes.num_heads % world_size:
        return f"must divide the model's num_attention_heads ({sizes.num_heads})"
    if sizes.num_kv_heads % world_size and world_size % sizes.num_kv_heads:
        # Fewer KV heads than ranks: each is kept by several.
        return f"must divide the model's num_kv_heads ({sizes.num_kv_heads}) or be a multiple of it"
    if sizes.intermediate_size % world_size:
        return f"must divide the model's intermediate_size ({sizes.intermediate_size})"
    return ""
