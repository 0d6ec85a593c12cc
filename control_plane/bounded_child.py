"""What processes have in common that run a client's programs, where nobody minds if one takes all time or memory.

The kernel bounds them. They speak frames over stdin and stdout: a length of four bytes, then JSON. They end when their
stdin does, whatever they are doing.
"""

from __future__ import annotations

import json
import os
import resource
import select
import struct
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


def frame(message: dict[str, Any]) -> bytes:
    """Return a message as it travels."""
    raw = json.dumps(message).encode()
    return _LENGTH.pack(len(raw)) + raw


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the next message; None at the end, also at one in the middle of it."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    raw = stream.read(length_of(head))
    if len(raw) < length_of(head):
        return None
    message: dict[str, Any] = json.loads(raw)
    return message


def length_of(head: bytes) -> int:
    """Return how many bytes follow the first ``LENGTH_BYTES`` of a frame."""
    return int(_LENGTH.unpack(head)[0])


def answer_frames(answer: Callable[[dict[str, Any]], dict[str, Any]], *, cpu_s: int) -> None:
    """Answer every question on stdin, each in so many seconds of processor time: who takes more is killed."""
    while (question := read_frame(sys.stdin.buffer)) is not None:
        _limit_cpu(cpu_s)
        sys.stdout.buffer.write(frame(answer(question)))
        sys.stdout.buffer.flush()


def _limit_cpu(seconds: int) -> None:
    """Allow what is used already and so much more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + seconds, hard))


def limit_memory(num_bytes: int) -> None:
    """Allow what is mapped already and so much more."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmData:"))
    limit = int(line.split()[1]) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def run_child(serve: Callable[[], None], *, stack_bytes: int) -> None:
    """Run the process: ``serve`` in a thread with a stack of that size, until it returns or stdin is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack_bytes)
    threading.Thread(target=_serve_or_die, args=(serve,), daemon=True).start()
    # A pipe is hung up when whoever writes to it is gone.
    parent = select.poll()
    parent.register(sys.stdin, select.POLLHUP)
    parent.poll()
    os._exit(0)


def _serve_or_die(serve: Callable[[], None]) -> None:
    """Take the process along whatever goes wrong: whoever waits for an answer, and all behind him, must hear of it."""
    try:
        serve()
    except BaseException:
        os._exit(1)
