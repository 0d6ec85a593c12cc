"""Answer several requests of one stream at the same time, their answers mixed as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")

# Answers that wait for a slow client; whoever has more waits too.
_MAX_WAITING = 64


class _End:
    """Stands behind the last answer."""


class Multiplexer(Generic[Question, Answer]):
    """The requests of one stream. ``answers`` is called once."""

    def __init__(self, answer: Callable[[Question], AsyncGenerator[Answer, None]]) -> None:
        """Take what answers one request, to its end, and raises nothing."""
        self._answer = answer
        self._queue: asyncio.Queue[Answer | _End] = asyncio.Queue(_MAX_WAITING)
        self._open: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._open)

    async def answers(self, questions: AsyncIterator[Question]) -> AsyncGenerator[Answer, None]:
        """Yield all answers, until the last request is answered after the last was read.

        Closing this closes every answer. What reading requests raises is raised here at once.
        """
        reader = asyncio.create_task(self._read(questions))
        try:
            while not isinstance(answer := await self._queue.get(), _End):
                yield answer
            await reader
        finally:
            tasks = [reader, *self._open]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, questions: AsyncIterator[Question]) -> None:
        try:
            async for question in questions:
                task = asyncio.create_task(self._serve(question))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            while self._open:
                await asyncio.wait(self._open)
        except Exception:
            await self._queue.put(_End())
            raise
        await self._queue.put(_End())

    async def _serve(self, question: Question) -> None:
        async with aclosing(self._answer(question)) as answers:
            async for answer in answers:
                await self._queue.put(answer)
