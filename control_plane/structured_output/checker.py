"""Compile grammars in a process of their own, where nobody minds if one takes all time or memory, or crashes.

A grammar comes from a client, and a few hundred bytes can be worth hours, gigabytes, or a stack that overflows. So each
is compiled here first, under limits that the kernel enforces: seconds of processor time, bytes of memory, a small
stack. What survives is compiled again where it is served.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import numpy as np

from control_plane.bounded_child import answer_frames, limit_memory, read_frame, run_child
from control_plane.structured_output.constraint import BadConstraint, Constraint, ConstraintKind
from control_plane.structured_output.grammar_text import grammar_text, spells_one_of, without_forcing
from control_plane.structured_output.vocabulary import Vocabulary, new_matcher

CPU_S = 5  # for one grammar
MEMORY_BYTES = 256 << 20  # the same
STACK_BYTES = 4 << 20  # less than there is where it is compiled again


def as_message(constraint: Constraint) -> dict[str, Any]:
    """Return the question whether a constraint can be served."""
    return {"kind": constraint.kind.value, "text": constraint.text, "options": constraint.options}


class Checker:
    """Answers for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.build()
        self._special_texts = vocabulary.special_texts()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return ``grammar`` and ``num_bytes`` of memory that it took, or ``rule`` with ``where`` and ``value``."""
        kind, options = ConstraintKind(question["kind"]), tuple(question["options"])
        before = _resident_bytes()
        constraint = Constraint(kind, question["text"], options)
        try:
            grammar = grammar_text(constraint)
        except BadConstraint as error:
            return {"rule": error.rule, "where": error.where, "value": repr(error.value) if error.where else None}
        except UnicodeEncodeError:  # JSON can say halves of characters
            return {"rule": "must be Unicode text: \\ud800 to \\udfff come in pairs"}
        if spells_one_of(constraint, self._special_texts):
            grammar = without_forcing(grammar)
        matcher = new_matcher(self._tokenizer, grammar)
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8) if not matcher.is_error() else None
        fault = matcher.get_error() if matcher.is_error() else ""
        if fault.startswith("NoExtension") or (mask is not None and not mask.any()):
            return {"rule": "cannot be met by any text"}
        if fault:
            return {"rule": f"cannot be compiled: {_first_lines(fault)}"}
        return {"grammar": grammar, "num_bytes": max(0, _resident_bytes() - before)}


def _first_lines(text: str) -> str:
    """Return the library's message without what it shows of the grammar."""
    told = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("<")]
    return " ".join(told)[:500]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _serve() -> None:
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    checker = Checker(Vocabulary.from_dict(first))
    limit_memory(MEMORY_BYTES)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            return checker.answer(question)
        except MemoryError:
            return {"rule": f"needs more than {MEMORY_BYTES >> 20} MiB of memory"}

    answer_frames(answer, cpu_s=CPU_S)


def main() -> None:
    """Run the process. The library lets others run while it compiles, so that its end is noticed."""
    run_child(_serve, stack_bytes=STACK_BYTES)


if __name__ == "__main__":
    main()
