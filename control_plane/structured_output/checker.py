"""Compile grammars in a process of their own, where nobody minds if one takes all time or memory, or crashes.

A grammar comes from a client, and a few hundred bytes can be worth hours, gigabytes, or a stack that overflows. So each
is compiled here first, under limits that the kernel enforces: seconds of processor time, bytes of memory, a small
stack. What survives is compiled again where it is served.

Speaks frames over stdin and stdout: a length of four bytes, then JSON. Ends when its stdin does, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import resource
import select
import struct
import sys
import threading
from typing import Any, BinaryIO

import numpy as np

from control_plane.structured_output.constraint import BadConstraint, Constraint, ConstraintKind
from control_plane.structured_output.grammar_text import grammar_text
from control_plane.structured_output.vocabulary import Vocabulary, new_matcher

CPU_S = 5  # for one grammar
MEMORY_BYTES = 256 << 20  # the same
STACK_BYTES = 4 << 20  # less than there is where it is compiled again

_LENGTH = struct.Struct("<I")


def frame(message: dict[str, Any]) -> bytes:
    """Return a message as it travels."""
    raw = json.dumps(message).encode()
    return _LENGTH.pack(len(raw)) + raw


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Return the next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(_LENGTH.unpack(head)[0]))
    return message


def length_of(head: bytes) -> int:
    """Return how many bytes follow the first ``LENGTH_BYTES`` of a frame."""
    return int(_LENGTH.unpack(head)[0])


LENGTH_BYTES = _LENGTH.size


def as_message(constraint: Constraint) -> dict[str, Any]:
    """Return the question whether a constraint can be served."""
    return {"kind": constraint.kind.value, "text": constraint.text, "options": constraint.options}


class Checker:
    """Answers for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.build()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return ``grammar`` and ``num_bytes`` of memory that it took, or ``rule`` with ``where`` and ``value``."""
        kind, options = ConstraintKind(question["kind"]), tuple(question["options"])
        before = _resident_bytes()
        try:
            grammar = grammar_text(Constraint(kind, question["text"], options))
        except BadConstraint as error:
            return {"rule": error.rule, "where": error.where, "value": repr(error.value) if error.where else None}
        except UnicodeEncodeError:  # JSON can say halves of characters
            return {"rule": "must be Unicode text: \\ud800 to \\udfff come in pairs"}
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


def _limit_cpu() -> None:
    """Allow what is used already and ``CPU_S`` more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + CPU_S, hard))


def _limit_memory() -> None:
    """Allow what is mapped already and ``MEMORY_BYTES`` more."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmData:"))
    limit = int(line.split()[1]) * 1024 + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _serve() -> None:
    frames = sys.stdin.buffer
    first = read_frame(frames)
    if first is None:
        return
    checker = Checker(Vocabulary.from_dict(first))
    _limit_memory()
    while (question := read_frame(frames)) is not None:
        _limit_cpu()
        try:
            answer = checker.answer(question)
        except MemoryError:
            answer = {"rule": f"needs more than {MEMORY_BYTES >> 20} MiB of memory"}
        sys.stdout.buffer.write(frame(answer))
        sys.stdout.buffer.flush()


def _serve_or_die() -> None:
    """Take the process along whatever goes wrong: whoever waits for an answer, and all behind him, must hear of it."""
    try:
        _serve()
    except BaseException:
        os._exit(1)


def main() -> None:
    """Run the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve_or_die, daemon=True).start()
    # The library lets others run while it compiles. A pipe is hung up when whoever writes to it is gone.
    parent = select.poll()
    parent.register(sys.stdin, select.POLLHUP)
    parent.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
