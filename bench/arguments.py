"""What several of these programs take on their command line."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    """Read how often something is measured."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return count
