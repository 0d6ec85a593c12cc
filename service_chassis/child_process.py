"""Run one worker as a child process: start it, forward what it says, know at once when and why it ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Sequence

_KEPT_LINES = 50
_LONGEST_LINE_BYTES = 1 << 20
# After a process ended, how long its last words may take; a grandchild may hold the pipe open for longer.
_LAST_WORDS_S = 0.5
# What fetches models needs, and no worker: what a child does not have it cannot tell anybody.
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Group)\b(?::.*)?$")


class ChildProcess:
    """A started child. Holds nothing of who started it but the callback."""

    def __init__(self, process: Process, on_exit: Callable[[str, tuple[str, ...]], None], prefix: str) -> None:
        self._process = process
        self._prefix = prefix
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log_task = asyncio.create_task(self._forward_log(), name=f"log-{process.pid}")
        self._exit_task = asyncio.create_task(self._report_exit(), name=f"exit-{process.pid}")
        self.cause = ""  # set when it ended

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        *,
        pass_fds: Sequence[int],
        on_exit: Callable[[str, tuple[str, ...]], None],
        prefix: str = "",
    ) -> ChildProcess:
        """Start ``python`` with ``arguments``; ``on_exit`` gets the cause and the last log lines, from the event loop.

        A new program, never a fork of this one: gRPC and CUDA survive no fork. A session of its own: Ctrl-C in a
        terminal is for the control plane, which drains before it ends its workers. ``prefix`` comes before each line
        that is passed on and is no JSON.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            pass_fds=pass_fds,
            env={name: value for name, value in os.environ.items() if name not in _SECRETS},
            start_new_session=True,
            limit=_LONGEST_LINE_BYTES,
        )
        return cls(process, on_exit, prefix)

    @property
    def pid(self) -> int:
        """Its process id, also after its end."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """What it ended with, negative for a signal; None while it runs."""
        return self._process.returncode

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines it said."""
        return tuple(self._tail)

    async def wait(self) -> None:
        """Wait until it ended and its end was reported."""
        await asyncio.shield(self._exit_task)

    async def end(self, *, grace_s: float) -> None:
        """End it: SIGTERM, and SIGKILL after ``grace_s``."""
        self.signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._exit_task}, timeout=grace_s)
        if not done:
            self.signal(signal.SIGKILL)
        # A process in an uninterruptible system call outlives even SIGKILL; there is nothing more to do about it.
        await asyncio.wait({self._exit_task}, timeout=5.0)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _forward_log(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        while True:
            try:
                line = await pipe.readline()
            except ValueError:  # longer than the limit; it was dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\n")
            self._tail.append(text)
            # A line of JSON stays one, and has keys of its own that say who speaks.
            print(text if text.startswith("{") else self._prefix + text, file=sys.stderr, flush=True)

    async def _report_exit(self) -> None:
        code = await self._process.wait()
        await asyncio.wait({self._log_task}, timeout=_LAST_WORDS_S)
        self._log_task.cancel()
        await asyncio.gather(self._log_task, return_exceptions=True)
        self.cause = exit_cause(code, self.log_tail)
        self._on_exit(self.cause, self.log_tail)


def exit_cause(code: int, log_tail: Sequence[str]) -> str:
    """Say for people why a process ended: the signal or code, and the last exception it logged."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}"
    exception = next(filter(None, map(_exception_in, reversed(log_tail))), "")
    return f"exit code {code}, {exception}" if exception and code else f"exit code {code}"


def _exception_in(line: str) -> str:
    """Return the exception that a log line is about, plain or inside a JSON event; else nothing."""
    if line.startswith("{"):
        try:
            event = json.loads(line)
        except ValueError:
            return ""
        text = event.get("exception", "")
        line = text.rstrip().rsplit("\n", 1)[-1] if isinstance(text, str) else ""
    return line.strip() if _EXCEPTION_LINE.match(line.strip()) else ""
