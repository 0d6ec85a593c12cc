"""Keep the grammars of one engine's samples, and have ready what each may sample next.

As soon as a token is known, what may follow it is computed, in a thread; when the step that samples it is on its way,
its mask is mostly there already. A sample's walk is moved on only when the mask before was sent, so the thread never
has one walk twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from control_plane.structured_output.mask_rules import MaskRules

if TYPE_CHECKING:
    from control_plane.structured_output.compiler import Grammar
    from control_plane.structured_output.walk import Pace, Walk

K = TypeVar("K")  # what names a sample


class RowMasks(Generic[K]):
    """Event loop.

    Args:
        on_ready: called when masks have become ready.
        on_fault: called once for a sample that cannot go on, with a phrase.
    """

    def __init__(self, on_ready: Callable[[], None], on_fault: Callable[[K, str], None]) -> None:
        self._on_ready = on_ready
        self._on_fault = on_fault
        self._rules: dict[K, MaskRules] = {}  # of all samples that were entered
        self._walks: dict[K, Walk] = {}  # of those that have begun
        self._busy: set[K] = set()  # in the thread
        self._end_mask = b""  # of samples that are over; the same for all of a model
        self._thread: ThreadPoolExecutor | None = None
        self._pace: Pace | None = None  # of the thread

    def __contains__(self, key: K) -> bool:
        return key in self._rules

    def enter(self, key: K, rules: MaskRules) -> None:
        """Let a sample in whose grammar is still to come."""
        self._rules[key] = rules
        self._end_mask = rules.end_mask()

    def begin(self, keys: Sequence[tuple[K, Sequence[int]]], grammar: Grammar) -> None:
        """Give samples their grammar, each with the output that it has already."""
        from control_plane.structured_output.walk import Walk

        steps = []
        for key, output in keys:
            if (rules := self._rules.get(key)) is not None:
                # Copied in the loop's time, since it is microseconds: nobody else has the grammar's own matcher.
                num_words = -(-grammar.vocab_size // 32)
                self._walks[key] = walk = Walk(grammar.matcher.deep_copy(), num_words, rules)
                steps.append((key, walk, output))
        self._submit(steps)

    def advance(self, tokens: Sequence[tuple[K, int]]) -> None:
        """Move samples on by a token each."""
        self._submit([(key, self._walks[key], (token_id,)) for key, token_id in tokens if key in self._walks])

    def ready(self, keys: Sequence[K], has_ended: Callable[[K], bool]) -> list[bytes] | None:
        """Return a mask for each of some samples; None if one is not ready.

        A sample that has ended, and may have been let go, gets one that says so.
        """
        masks = []
        for key in keys:
            walk = self._walks.get(key)
            if has_ended(key):
                masks.append(self._end_mask)
            elif walk is None or key in self._busy or walk.mask is None:
                return None
            else:
                masks.append(walk.mask)
        return masks

    def forget(self, keys: Sequence[K]) -> None:
        """Let samples go."""
        for key in keys:
            self._rules.pop(key, None)
            self._walks.pop(key, None)
            self._busy.discard(key)

    def _submit(self, steps: list[tuple[K, Walk, Sequence[int]]]) -> None:
        if not steps:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._busy.update(key for key, _, _ in steps)
        future = self._thread.submit(self._work, [(walk, token_ids) for _, walk, token_ids in steps])
        loop = asyncio.get_running_loop()
        asyncio.wrap_future(future, loop=loop).add_done_callback(lambda done: self._on_done(steps, done))

    def _work(self, steps: list[tuple[Walk, Sequence[int]]]) -> None:
        if self._pace is None:
            from control_plane.structured_output.walk import Pace

            self._pace = Pace()
        self._pace.advance(steps)

    def _on_done(self, steps: list[tuple[K, Walk, Sequence[int]]], done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return  # by ``close``: nothing is wrong with these samples, and whoever closes ends or hands them on
        broke = done.exception() is not None
        for key, walk, _ in steps:
            if self._walks.get(key) is not walk:
                continue  # it went meanwhile
            self._busy.discard(key)
            if broke or walk.fault:
                self._on_fault(key, "cannot be followed any further" if broke else walk.fault)
        self._on_ready()

    def close(self) -> None:
        """End the thread, once it is done with what it has."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
