"""Refuse numbers that no server would take where they are typed: argparse names the flag and exits with 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from service_chassis.settings import Rule, at_least, read_number, read_whole

N = TypeVar("N", int, float)
LONGEST_S = 86_400  # a day
UINT32_MAX = 2**32 - 1
_FLOAT_MAX = 3.4e38  # of the 32 bits that messages have for it


def whole(minimum: int, at_most: int = UINT32_MAX) -> Callable[[str], int]:
    """Return an argparse type for whole numbers in [minimum, at_most]."""
    return _checked(read_whole, at_least(minimum, at_most=at_most))


def number(rule: Rule) -> Callable[[str], float]:
    """Return an argparse type for numbers that keep ``rule``."""
    return _checked(read_number, rule)


def finite_at_least_0(value: float) -> str:
    return "" if 0 <= value <= _FLOAT_MAX else "must be a finite number, at least 0"


def _checked(read: Callable[[str], N], rule: Rule) -> Callable[[str], N]:
    def parse(text: str) -> N:
        try:
            value = read(text)
            broken = rule(value)
        except ValueError as error:
            broken = str(error)
        if broken:
            raise argparse.ArgumentTypeError(f"{text[:40]} {broken}")
        return value

    return parse
