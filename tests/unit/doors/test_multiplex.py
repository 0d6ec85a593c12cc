"""Answers of several requests of one stream: mixed, bounded, and closed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from control_plane.doors import multiplex
from control_plane.doors.multiplex import Multiplexer
from support.waiting import until


def one_byte(question: int) -> int:
    return 1


async def given(*questions: int) -> AsyncIterator[int]:
    for question in questions:
        yield question


async def test_answers_of_all_requests_come_and_each_ones_in_order() -> None:
    async def count(up_to: int) -> AsyncGenerator[tuple[int, int], None]:
        for number in range(up_to):
            await asyncio.sleep(0)
            yield up_to, number

    heard = [
        one async for one in Multiplexer(count, size_of=one_byte).answers(given(3, 0, 200, 5), closing=asyncio.Event())
    ]
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

    multiplexer = Multiplexer(endless, size_of=one_byte)
    async with asyncio.timeout(10), aclosing(multiplexer.answers(given(1, 2, 3), closing=asyncio.Event())) as answers:
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

    multiplexer, heard = Multiplexer(waiting, size_of=one_byte), set()

    async def read() -> None:
        async for one in multiplexer.answers(breaks(), closing=asyncio.Event()):
            heard.add(one)

    with pytest.raises(ValueError, match="not a message"):
        await asyncio.wait_for(read(), 10)
    assert heard <= set(closed) <= {1, 2}
    assert multiplexer.num_open == 0


@pytest.mark.parametrize(("size", "most"), [(1, multiplex._MAX_OPEN), (1 << 20, 64), (1 << 30, 1)])
async def test_no_more_is_read_while_nobody_listens(size: int, most: int) -> None:
    """Whoever sends without end and takes no answer fills no memory; once answers are taken all goes on."""
    num_read = 0

    async def ask() -> AsyncIterator[int]:
        nonlocal num_read
        for num_read in range(1, 3 * most + 1):
            yield num_read

    async def answer(question: int) -> AsyncGenerator[int, None]:
        for _ in range(100):
            yield question

    multiplexer = Multiplexer(answer, size_of=lambda question: size)
    heard: set[int] = set()
    async with asyncio.timeout(60), aclosing(multiplexer.answers(ask(), closing=asyncio.Event())) as answers:
        heard.add(await anext(answers))
        await until(lambda: multiplexer.num_open == most, "as many as there may be are open")
        for _ in range(100):
            await asyncio.sleep(0)
        assert (multiplexer.num_open, num_read) == (most, most + 1)
        if most <= 64:
            heard |= {one async for one in answers}
            assert heard == set(range(1, 3 * most + 1))
    assert multiplexer.num_open == 0


async def test_idle_stream_ends_when_all_closes_and_a_busy_one_once_it_is_idle() -> None:
    answered, closing = asyncio.Event(), asyncio.Event()

    async def ask() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async def answer(question: int) -> AsyncGenerator[int, None]:
        yield question
        await answered.wait()
        yield question

    multiplexer, heard = Multiplexer(answer, size_of=one_byte), []
    async with asyncio.timeout(10), aclosing(multiplexer.answers(ask(), closing=closing)) as answers:
        heard.append(await anext(answers))
        closing.set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not multiplexer.was_closed
        answered.set()
        heard += [one async for one in answers]
    assert (heard, multiplexer.was_closed) == ([1, 1], True)
