"""Check a model's generation_config.json when it is read: its values stand in for those that requests leave out.

A wrong one would otherwise be told to clients, request by request, as if they had sent it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from service_chassis.settings import Fault, Rule, above, at_least

_COUNTS: Mapping[str, Rule] = {
    "top_k": at_least(-1, at_most=2**31 - 1),
    "max_new_tokens": at_least(1, at_most=2**31 - 1),
}
_NUMBERS: Mapping[str, Rule] = {
    "temperature": lambda value: "" if 0 <= value < math.inf else "must be a finite number, at least 0",
    "top_p": above(0, at_most=1),
    "min_p": at_least(0, at_most=1),
    "repetition_penalty": at_least(0.01, at_most=10),
}
_RULES: Mapping[str, Rule] = {**_COUNTS, **_NUMBERS}


def generation_faults(generation: Mapping[str, Any], path: str, vocab_size: int) -> list[Fault]:
    """Return what is wrong with the values that are used here; the others, and null, are left alone."""
    broken = {name: _broken(generation.get(name), rule, whole=name in _COUNTS) for name, rule in _RULES.items()}
    broken["eos_token_id"] = _broken_ids(generation.get("eos_token_id"), vocab_size)
    return [("model", path, f"{name} {generation[name]!r:.80} {rule}") for name, rule in broken.items() if rule]


def _broken(value: object, rule: Rule, *, whole: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a whole number" if whole else "must be a number"
    if whole and isinstance(value, float) and not value.is_integer():
        return "must be a whole number"
    return rule(value)


def _broken_ids(value: object, vocab_size: int) -> str:
    if value is None:
        return ""
    ids = value if isinstance(value, list) else [value]
    fine = all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocab_size for one in ids)
    return "" if fine else f"must be a token id, or a list of them, in [0, {vocab_size})"
