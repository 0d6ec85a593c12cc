"""Readers of streams take turns: in order, a few in each pass of the loop, and no more than there is time for."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.generation import Generation, SamplingChoice
from control_plane.generation_stream import GenerationStream
from control_plane.turns import FEW, FIRST_RATE, LEAST_RATE, MOST_BUSY, MOST_RATE, SAVED_S, Turns, changed_rate
from service_chassis.ids import RequestId


async def line_up(turns: Turns, count: int) -> list[asyncio.Future[None]]:
    waiters = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for waiter in waiters:
        turns.line_up(waiter)
    return waiters


async def test_turns_come_in_order_a_few_in_each_pass() -> None:
    turns = Turns.here()
    waiters = await line_up(turns, 3 * FEW)
    for num_passes in range(1, 4):
        await asyncio.sleep(0)
        assert [waiter.done() for waiter in waiters] == [index < num_passes * FEW for index in range(3 * FEW)]


async def test_turn_of_a_waiter_that_was_cancelled_goes_to_the_next() -> None:
    waiters = await line_up(Turns.here(), FEW + 1)
    waiters[0].cancel()
    await asyncio.sleep(0)
    assert all(waiter.done() for waiter in waiters)


async def test_nobody_overtakes_those_in_line() -> None:
    turns = Turns.here()
    assert turns.take()
    waiters = await line_up(turns, 1)
    assert not turns.take()
    await asyncio.wait_for(waiters[0], 30)


async def test_more_than_was_saved_up_comes_later_and_all_of_it() -> None:
    turns = Turns.here()
    saved = int(SAVED_S * FIRST_RATE)
    waiters = await line_up(turns, saved + 50)
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(waiter.done() for waiter in waiters) < saved
    await asyncio.wait_for(asyncio.gather(*waiters), 30)


@pytest.mark.parametrize(
    ("rate", "busy", "grows"), [(9_000.0, MOST_BUSY - 0.1, True), (9_000.0, MOST_BUSY + 0.1, False)]
)
def test_rate_follows_the_time_that_is_left(rate: float, busy: float, grows: bool) -> None:
    assert (changed_rate(rate, busy) > rate) is grows


def test_rate_has_bounds_whatever_the_load() -> None:
    rate = FIRST_RATE
    for _ in range(200):
        rate = changed_rate(rate, 1.0)
    assert rate == LEAST_RATE
    for _ in range(200):
        rate = changed_rate(rate, 0.0)
    assert rate == MOST_RATE


async def test_slow_reader_of_a_stream_gets_what_gathered_while_it_waited_its_turn() -> None:
    """Hundreds of readers are woken at once; the last of them finds in one chunk what came meanwhile."""
    streams = [
        GenerationStream(
            Generation(request_id=RequestId(str(index)), prompt_token_ids=(1,), sampling=SamplingChoice()), lambda: None
        )
        for index in range(8 * FEW)
    ]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)  # all wait
    for token_id in (5, 6, 7):
        for stream in streams:
            stream.put_tokens(0, [token_id], "")
        await asyncio.sleep(0)
    chunks = await asyncio.wait_for(asyncio.gather(*readers), 30)
    told = [chunk.token_ids for chunk in chunks]  # type: ignore[union-attr]
    assert len(told[0]) < 3
    assert told[-1] == [5, 6, 7]
    assert sorted(told, key=len) == told  # who waited longer got more at once
