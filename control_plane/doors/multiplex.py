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
# Requests in hand, those among them that are only being refused. Beyond either bound no more are read, so that whoever
# sends and does not listen is held up by the transport, and fills no memory here.
_MAX_OPEN = 2048
_MAX_OPEN_BYTES = 64 << 20


class _End:
    """Stands behind the last answer."""


class Multiplexer(Generic[Question, Answer]):
    """The requests of one stream. ``answers`` is called once."""

    def __init__(
        self, answer: Callable[[Question], AsyncGenerator[Answer, None]], *, size_of: Callable[[Question], int]
    ) -> None:
        """Take what answers one request, to its end, and raises nothing; and what says how many bytes one has."""
        self._answer = answer
        self._size_of = size_of
        self._queue: asyncio.Queue[Answer | _End] = asyncio.Queue(_MAX_WAITING)
        self._open: dict[asyncio.Task[None], int] = {}
        self._open_bytes = 0
        self._has_room = asyncio.Event()
        self.was_closed = False

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._open)

    async def answers(
        self, questions: AsyncIterator[Question], *, closing: asyncio.Event
    ) -> AsyncGenerator[Answer, None]:
        """Yield all answers, until the last request is answered after the last was read.

        Closing this closes every answer. What reading requests raises is raised here at once. After ``closing`` it ends
        as soon as all that was read is answered, also if its client may still want something: see ``was_closed``.
        """
        reader = asyncio.create_task(self._read(questions))
        closer = asyncio.create_task(self._close(closing, reader))
        try:
            while not isinstance(answer := await self._queue.get(), _End):
                yield answer
            if not self.was_closed:
                await reader
        finally:
            tasks = [reader, closer, *self._open]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, questions: AsyncIterator[Question]) -> None:
        try:
            async for question in questions:
                size = self._size_of(question)
                while self._open and (len(self._open) >= _MAX_OPEN or self._open_bytes + size > _MAX_OPEN_BYTES):
                    self._has_room.clear()
                    await self._has_room.wait()
                task = asyncio.create_task(self._serve(question))
                self._open[task] = size
                self._open_bytes += size
                task.add_done_callback(self._on_answered)
            while self._open:
                await asyncio.wait(self._open)
        except Exception:
            await self._queue.put(_End())
            raise
        await self._queue.put(_End())

    async def _close(self, closing: asyncio.Event, reader: asyncio.Task[None]) -> None:
        await closing.wait()
        while self._open:
            await asyncio.wait(self._open)
        if not reader.done():
            self.was_closed = True
            reader.cancel()
            await self._queue.put(_End())

    def _on_answered(self, task: asyncio.Task[None]) -> None:
        self._open_bytes -= self._open.pop(task)
        self._has_room.set()

    async def _serve(self, question: Question) -> None:
        async with aclosing(self._answer(question)) as answers:
            async for answer in answers:
                await self._queue.put(answer)
