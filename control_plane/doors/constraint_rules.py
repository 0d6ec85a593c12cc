"""Read what an output must match, and bound how much a client may say of it. What it means is checked elsewhere."""

from __future__ import annotations

from control_plane.structured_output.constraint import FIELD, Constraint, ConstraintKind
from maniple.v1.sampling_pb2 import SamplingParams, StructuredOutput
from service_chassis.errors import InvalidParameter

MAX_CONSTRAINT_BYTES = 1 << 17
MAX_OPTIONS = 10_000


def resolve_constraint(wanted: SamplingParams) -> Constraint | None:
    """Return the constraint of a request, None where it has none. Raises ``InvalidParameter``."""
    if not wanted.HasField("structured_output"):
        return None
    said: StructuredOutput = wanted.structured_output
    which = said.WhichOneof("constraint")
    if which is None:
        raise InvalidParameter(FIELD, "{}", f"must set one of {', '.join(kind.value for kind in ConstraintKind)}")
    kind = ConstraintKind(which)
    if kind is ConstraintKind.JSON_OBJECT:
        if not said.json_object:
            raise InvalidParameter(f"{FIELD}.json_object", False, "must be true, or unset")
        return Constraint(kind)
    if kind is ConstraintKind.CHOICE:
        return _choice(list(said.choice.options))
    constraint = Constraint(kind, getattr(said, which))
    if not constraint.text:
        raise InvalidParameter(constraint.field, "", "must not be empty")
    return _bounded(constraint)


def _choice(options: list[str]) -> Constraint:
    field = f"{FIELD}.choice.options"
    if not options:
        raise InvalidParameter(field, [], "must hold at least one")
    if len(options) > MAX_OPTIONS:
        raise InvalidParameter(field, f"{len(options)} entries", f"may have at most {MAX_OPTIONS}")
    if "" in options:
        raise InvalidParameter(field, "", "must not be empty")
    return _bounded(Constraint(ConstraintKind.CHOICE, options=tuple(dict.fromkeys(options))))


def _bounded(constraint: Constraint) -> Constraint:
    if constraint.num_bytes > MAX_CONSTRAINT_BYTES:
        rule = f"may have at most {MAX_CONSTRAINT_BYTES} bytes"
        raise InvalidParameter(constraint.field, f"{constraint.num_bytes} bytes", rule)
    return constraint
