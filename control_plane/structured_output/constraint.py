"""What an output must match, as a client said it. Plain values: nothing here knows a grammar library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FIELD = "sampling.structured_output"


class ConstraintKind(Enum):
    """The fields of ``maniple.v1.StructuredOutput``, by their names."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint. The text is the client's: it is left out of what is printed."""

    kind: ConstraintKind
    text: str = ""  # of every kind but JSON_OBJECT and CHOICE
    options: tuple[str, ...] = ()  # of CHOICE

    @property
    def field(self) -> str:
        """The field that said it."""
        return f"{FIELD}.{self.kind.value}"

    @property
    def num_bytes(self) -> int:
        """Bytes of what the client wrote."""
        return len(self.text.encode()) + sum(len(option.encode()) for option in self.options)

    def __repr__(self) -> str:
        return f"Constraint({self.kind.value}, {self.num_bytes} bytes)"


def shown(constraint: Constraint) -> object:
    """Return what a message may say of a constraint: its beginning."""
    if constraint.options:
        return list(constraint.options[:4])
    return constraint.text if constraint.text else True


class BadConstraint(Exception):
    """A constraint that cannot be served. ``where`` is a path below its field, or nothing; ``rule`` a phrase."""

    def __init__(self, rule: str, *, where: str = "", value: object = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.where = where
        self.value = value
