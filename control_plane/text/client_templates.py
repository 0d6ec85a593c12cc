"""Render chat templates that clients send, in a process of their own.

The sandbox bounds what a template reaches and how long it goes on between two of its steps. But one step may be worth
gigabytes: a join, a replacement, a list of lists that is printed. Only the kernel bounds that.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from control_plane.bounded_child import answer_frames, frame, limit_memory, read_frame, run_child
from control_plane.text.chat_template import ChatTemplate
from service_chassis.errors import InvalidParameter, NotReady, QueueFull
from service_chassis.telemetry import get_logger

log = get_logger()

CPU_S = 2  # for one rendering; the sandbox allows a second
MEMORY_BYTES = 256 << 20  # the same
STACK_BYTES = 8 << 20
# For a machine that gives the process no time.
ANSWER_TIMEOUT_S = 30.0
MAX_WAITING = 64


class ClientTemplates:
    """One process, started by the first template that comes; one rendering at a time, the others wait."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._child = _Child()
        self._num_waiting = 0
        self._is_closed = False
        weakref.finalize(self, self._child.end)

    async def render(
        self, source: str, special_tokens: Mapping[str, str], messages: list[Mapping[str, Any]], **options: Any
    ) -> str:
        """Return the prompt of a conversation; ``options`` are those of ``ChatTemplate.render``.

        Raises:
            InvalidParameter: as ``ChatTemplate`` does, or the template takes too much.
            QueueFull: too many wait.
            NotReady: closed.
        """
        if self._is_closed:
            raise NotReady("not accepting requests: shutting down")
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} chat templates of clients wait to be rendered", retry_after_s=1.0)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="templates")
        question = {"source": source, "special_tokens": dict(special_tokens), "messages": messages, "options": options}
        self._num_waiting += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._child.ask, question)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            answer = None
        finally:
            self._num_waiting -= 1
        if answer is None and self._is_closed:
            raise NotReady("not accepting requests: shutting down")
        if answer is None:
            rule = f"takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB to render"
            raise InvalidParameter("chat_template", source, rule)
        if "text" not in answer:
            raise InvalidParameter(answer["field"], answer["value"], answer["rule"])
        return str(answer["text"])

    def close(self) -> None:
        """End the process, whatever it is doing, and let those go that wait."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._child.kill()


class _Child:
    """The process. Blocking; asked by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None where the question was the end of the process."""
        process = self._process or self._start()
        if self._is_over:
            process.kill()
        alarm = threading.Timer(ANSWER_TIMEOUT_S, process.kill)
        alarm.daemon = True
        alarm.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(frame(question))
            process.stdin.flush()
            answer = read_frame(process.stdout)
        except OSError:
            answer = None
        finally:
            alarm.cancel()
        if answer is None:
            log.warning("template_process.died", exit_code=self.end())
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "control_plane.text.client_templates"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it may say of a template is the client's
            start_new_session=True,
        )
        return self._process

    def kill(self) -> None:
        """Have a rendering end now, also one that has not begun."""
        self._is_over = True
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> int | None:
        """End the process, if there is one; return what it ended with."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):  # it was gone before it had read all
            process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(1.0)  # by itself: signalled now, it could not say what it died of
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        template = ChatTemplate(question["source"], question["special_tokens"])
        return {"text": template.render(question["messages"], **question["options"])}
    except InvalidParameter as error:
        return {"field": error.field, "value": error.value, "rule": error.rule}


def _serve() -> None:
    limit_memory(MEMORY_BYTES)
    answer_frames(_answer, cpu_s=CPU_S)


if __name__ == "__main__":
    run_child(_serve, stack_bytes=STACK_BYTES)
