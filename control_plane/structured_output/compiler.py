"""Compile constraints for the engines of one control plane, each once while it is in use or was lately.

What a client may cost is bounded here: bytes of its text at the doors, time and memory by the checker's process, the
number of grammars that wait for it, and the memory of all grammars that live.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.structured_output.constraint import BadConstraint, Constraint, shown
from service_chassis.errors import InvalidParameter, QueueFull

if TYPE_CHECKING:  # what imports the library is imported by the first constraint
    from llguidance import LLMatcher, LLTokenizer

    from control_plane.structured_output.checker_process import CheckerProcess
    from control_plane.text.model_text import ModelText

MAX_WAITING = 64
# Of grammars that nobody uses at the moment.
MAX_KEPT = 128
MAX_KEPT_BYTES = 64 << 20
# Of grammars that live, used or kept.
MAX_LIVE_BYTES = 1 << 30
# A compiled grammar has at least some parts for each byte of its text.
_BYTES_PER_BYTE = 32


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Grammar:
    """A compiled constraint. The matcher is at the beginning and stays there: samples walk on with copies."""

    constraint: Constraint
    matcher: LLMatcher
    vocab_size: int  # of the tokenizer
    num_bytes: int


class GrammarCompiler:
    """Used by the event loop. Compiles in a thread, of which there is one."""

    def __init__(self, text: Callable[[], ModelText]) -> None:
        """Prepare; nothing is started, and the model not looked at, before the first constraint comes."""
        self._text = text
        self._checker: CheckerProcess | None = None
        self._tokenizer: LLTokenizer | None = None  # of the thread
        self._thread: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()  # the one used last comes last
        self._compiling: dict[Constraint, asyncio.Task[Grammar]] = {}
        self._live_bytes = 0

    @property
    def checker_pid(self) -> int | None:
        """The process that tries grammars, while there is one."""
        return self._checker.pid if self._checker is not None else None

    async def compile(self, constraint: Constraint) -> Grammar:
        """Return a constraint, compiled.

        Raises:
            InvalidParameter: it cannot be served; names what of it.
            QueueFull: too many wait, or the memory for grammars is used up.
        """
        if (kept := self._kept.get(constraint)) is not None:
            self._kept.move_to_end(constraint)
            return kept
        task = self._compiling.get(constraint)
        if task is None:
            if len(self._compiling) >= MAX_WAITING:
                raise QueueFull(f"{len(self._compiling)} constraints wait to be compiled already", retry_after_s=1.0)
            task = self._compiling[constraint] = asyncio.create_task(self._compile(constraint))
            task.add_done_callback(lambda done: self._on_compiled(constraint, done))
        # Several may wait for it, and one who goes away must not take it from the others.
        return await asyncio.shield(task)

    def _on_compiled(self, constraint: Constraint, task: asyncio.Task[Grammar]) -> None:
        del self._compiling[constraint]
        if not task.cancelled():
            task.exception()  # whoever waited was told; perhaps nobody did any more

    async def _compile(self, constraint: Constraint) -> Grammar:
        from control_plane.structured_output.checker import STACK_BYTES
        from control_plane.structured_output.checker_process import CheckerProcess
        from control_plane.structured_output.vocabulary import vocabulary_of

        if self._checker is None or self._thread is None:
            self._vocabulary = vocabulary_of(self._text())
            self._checker = CheckerProcess(self._vocabulary)
            self._thread = _one_thread("grammars", 4 * STACK_BYTES)
        if not self._vocabulary.eos_ids:
            raise InvalidParameter(constraint.field, shown(constraint), "needs a model that names an end of text")
        try:
            text, num_bytes = await self._checker.check(constraint)
        except BadConstraint as error:
            field = f"{constraint.field}.{error.where}" if error.where else constraint.field
            value = error.value if error.where else shown(constraint)
            raise InvalidParameter(field, value, error.rule) from None
        num_bytes = max(num_bytes, _BYTES_PER_BYTE * len(text))
        if self._live_bytes + num_bytes > MAX_LIVE_BYTES:
            self._kept.clear()
        if self._live_bytes + num_bytes > MAX_LIVE_BYTES:
            raise QueueFull(f"the grammars in use take {self._live_bytes >> 20} MiB already", retry_after_s=1.0)
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._thread, lambda: self._new_matcher(text))
        if matcher.is_error():  # it passed a moment ago, with the same library and the same limits
            raise InvalidParameter(constraint.field, shown(constraint), "cannot be compiled here")
        grammar = Grammar(constraint, matcher, self._vocabulary.vocab_size, num_bytes)
        self._live_bytes += num_bytes
        weakref.finalize(grammar, self._on_forgotten, num_bytes)
        self._keep(grammar)
        return grammar

    def _new_matcher(self, text: str) -> LLMatcher:
        from control_plane.structured_output.vocabulary import new_matcher

        if self._tokenizer is None:
            self._tokenizer = self._vocabulary.build()
        return new_matcher(self._tokenizer, text)

    def _on_forgotten(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes

    def _keep(self, grammar: Grammar) -> None:
        if grammar.num_bytes > MAX_KEPT_BYTES // 4:
            return
        self._kept[grammar.constraint] = grammar
        while len(self._kept) > MAX_KEPT or sum(kept.num_bytes for kept in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    async def close(self) -> None:
        """End what was started. Idempotent."""
        for task in list(self._compiling.values()):
            task.cancel()
        if self._checker is not None:
            await self._checker.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _one_thread(name: str, stack_bytes: int) -> ThreadPoolExecutor:
    """Return a pool whose one thread has a stack of that size."""
    before = threading.stack_size(stack_bytes)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        pool.submit(lambda: None).result()
    finally:
        threading.stack_size(before)
    return pool
