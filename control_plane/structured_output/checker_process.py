"""Keep the process that tries grammars: start it when it is needed, ask it, start another one when it died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any

from control_plane.bounded_child import LENGTH_BYTES, frame, length_of
from control_plane.structured_output.checker import CPU_S, MEMORY_BYTES, as_message
from control_plane.structured_output.constraint import BadConstraint, Constraint
from control_plane.structured_output.vocabulary import Vocabulary
from service_chassis.telemetry import get_logger

log = get_logger()

# Its processor time is bounded by the kernel; this is for a machine that gives it none.
ANSWER_TIMEOUT_S = 60.0
_DYING_S = 10.0

_CAUSES = {
    signal.SIGXCPU: f"takes more than {CPU_S} s to compile",
    signal.SIGKILL: f"takes more than {CPU_S} s to compile",
    signal.SIGABRT: f"needs more than {MEMORY_BYTES >> 20} MiB of memory to compile",
    signal.SIGSEGV: "is nested too deeply to compile",
    signal.SIGBUS: "is nested too deeply to compile",
}


class CheckerProcess:
    """One question at a time; the others wait."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._process.pid if self._process is not None else None

    async def check(self, constraint: Constraint) -> tuple[str, int]:
        """Return the grammar of a constraint and the bytes of memory that it takes.

        Raises:
            BadConstraint: it cannot be served.
        """
        async with self._turn:
            answer = await self._ask(constraint)
        if "rule" in answer:
            raise BadConstraint(answer["rule"], where=answer.get("where", ""), value=answer.get("value"))
        return answer["grammar"], answer["num_bytes"]

    async def _ask(self, constraint: Constraint) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                process = self._process or await self._start()
                return await _exchange(process, as_message(constraint))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._end(is_dying=True)
            log.warning("grammar_check.died", constraint=repr(constraint), exit_code=code)
            try:
                rule = _CAUSES[signal.Signals(-code)]
            except (KeyError, ValueError):
                rule = "cannot be compiled: the attempt failed"
            raise BadConstraint(rule) from None
        except TimeoutError:
            await self._end()
            log.warning("grammar_check.timed_out", constraint=repr(constraint), timeout_s=ANSWER_TIMEOUT_S)
            raise BadConstraint(f"takes more than {ANSWER_TIMEOUT_S:g} s to compile") from None
        except BaseException:  # cancelled between question and answer: the next one must not read this answer
            await asyncio.shield(self._end())
            raise

    async def _start(self) -> Process:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "control_plane.structured_output.checker",
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # what it may say of a grammar is the client's
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(frame(self._vocabulary.to_dict()))
        await process.stdin.drain()
        return process

    async def _end(self, *, is_dying: bool = False) -> int:
        """Kill the process, if there is one; return what it ended with."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if is_dying:
            # It closed its pipe, so it is about to end by itself. Signalling it now would take its exit status from
            # whoever waits for it.
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(process.wait(), _DYING_S)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    async def close(self) -> None:
        """End the process. Another question starts another one."""
        await self._end()


async def _exchange(process: Process, question: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame(question))
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    answer: dict[str, Any] = json.loads(await process.stdout.readexactly(length_of(head)))
    return answer
