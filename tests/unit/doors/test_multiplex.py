"""Answers of several requests of one stream: mixed, bounded, and closed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from control_plane.doors.multiplex import Multiplexer
from support.waiting import until


async def given(*questions: int) -> AsyncIterator[int]:
    for question in questions:
        yield question


async def test_answers_of_all_requests_come_and_each_ones_in_order() -> None:
    async def count(up_to: int) -> AsyncGenerator[tuple[int, int], None]:
        for number in range(up_to):
            await asyncio.sleep(0)
            yield up_to, number

    heard = [one async for one in Multiplexer(count).answers(given(3, 0, 200, 5))]
    for up_to in (3, 200, 5):
        assert [number for asked, number in heard if asked == up_to] == list(range(up_to))
    assert len(heard) == 208


async def test_closing_closes_every_answer_also_while_nobody_reads_and_the_queue_is_full() -> None:
    closed: list[int] = []

    async def endless(question: int) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield question
                await asyncio.sleep(0)
        finally:
            closed.append(question)

    multiplexer = Multiplexer(endless)
    async with asyncio.timeout(10), aclosing(multiplexer.answers(given(1, 2, 3))) as answers:
        await anext(answers)
        await until(lambda: multiplexer.num_open == 3, "all three are open")
        for _ in range(300):
            await asyncio.sleep(0)
    assert sorted(closed) == [1, 2, 3]
    assert multiplexer.num_open == 0


async def test_what_reading_raises_ends_all() -> None:
    closed: list[int] = []

    async def waiting(question: int) -> AsyncGenerator[int, None]:
        try:
            yield question
            await asyncio.Event().wait()
        finally:
            closed.append(question)

    async def breaks() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise ValueError("not a message")

    multiplexer, heard = Multiplexer(waiting), set()

    async def read() -> None:
        async for one in multiplexer.answers(breaks()):
            heard.add(one)

    with pytest.raises(ValueError, match="not a message"):
        await asyncio.wait_for(read(), 10)
    assert heard <= set(closed) <= {1, 2}
    assert multiplexer.num_open == 0
