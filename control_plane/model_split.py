"""Refuse a number of ranks that a model's layers cannot be split over, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

from service_chassis.errors import ConfigurationError
from service_chassis.tensor_parallel import read_split_sizes, split_rule


def check_split(directory: str, tensor_parallel_size: int) -> None:
    """Check the split where the model's configuration can be read here; workers check it in any case.

    Raises:
        ConfigurationError: names the sizes that would work.
    """
    try:
        raw = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a scripted model, or files that only the workers have or complain about
        return
    sizes = read_split_sizes(raw) if isinstance(raw, dict) else None
    if sizes is not None and (rule := split_rule(sizes, tensor_parallel_size)):
        raise ConfigurationError([("tensor_parallel_size", tensor_parallel_size, rule)])
