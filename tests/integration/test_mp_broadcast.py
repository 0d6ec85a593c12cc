"""Deltas to child processes through shared memory: nothing of them on the streams, nothing lost, nothing twice."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from control_plane.executors.base import StepsConnection
from control_plane.executors.multiproc import MultiprocExecutor
from maniple.v1 import worker_pb2
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from service_chassis.ids import Rank
from service_chassis.protocol.broadcast_ring import is_supported
from support.faults import SETTINGS, WORKER, LiveGroup, assert_next_group_works, forming
from support.one_row import scripted_tokens
from support.waiting import until

pytestmark = pytest.mark.skipif(not is_supported(), reason="the ring needs Linux")


class WatchedConnection:
    """A stream that notes what is written to it, and breaks in place of chosen results."""

    def __init__(self, inner: StepsConnection, owner: RingExecutor) -> None:
        self._inner = inner
        self._owner = owner

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        self._owner.written.append(str(message.WhichOneof("message")))
        await self._inner.write(message)

    async def read(self) -> worker_pb2.StepsResponse | None:
        message = await self._inner.read()
        if message is not None and message.HasField("result") and message.result.step in self._owner.lose_results:
            self._owner.lose_results.remove(message.result.step)
            await self._inner.close()
            raise ConnectionError("broken on purpose")
        return message

    async def close(self) -> None:
        await self._inner.close()


class RingExecutor(MultiprocExecutor):
    """Child processes that get their deltas through a ring."""

    def __init__(self, world_size: int = 2) -> None:
        super().__init__(world_size=world_size, settings=WORKER, broadcast_ring=True)
        self.written: list[str] = []  # messages on Steps
        self.lose_results: set[int] = set()

    async def open_steps(self, rank: Rank) -> StepsConnection:
        return WatchedConnection(await super().open_steps(rank), self)


async def test_deltas_reach_every_rank_and_never_a_stream() -> None:
    executor = RingExecutor(3)
    async with forming(executor=executor) as live:
        await live.run_steps(20)
        live.assert_tokens_exact()
        await until(lambda: all(rank.completed == 20 for rank in live.group.ranks()), "all ranks are there")
    assert "delta" not in executor.written
    assert executor.written.count("hello") == 3


async def test_broken_stream_costs_no_delta_and_no_result() -> None:
    executor = RingExecutor()
    async with forming(executor=executor) as live:
        executor.lose_results = {2, 3, 7}
        for _ in range(8):
            live.send_step()
        await until(lambda: 8 in live.result_steps, "all results")
        live.assert_tokens_exact()
        assert executor.written.count("hello") == 2 + 3
        await live.run_steps(5)
        live.assert_tokens_exact()
        assert not live.losses
    assert "delta" not in executor.written


async def test_rank_that_is_a_whole_ring_behind_gets_everything_in_order() -> None:
    executor = RingExecutor()
    async with forming(executor=executor, heartbeat_timeout_s=20.0) as live:
        await live.run_steps(1)
        pid = executor.describe_rank(Rank(1))[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(600):  # the ring has room for 256
                delta = live.row.idle()
                live.group.send(
                    delta.step, delta.SerializeToString(), delta.mode, state_digest=delta.state_digest, num_tokens=0
                )
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: all(rank.accepted == 601 for rank in live.group.ranks()), "all of it")
        await live.run_steps(2)
        assert not live.losses
        assert live.tokens == scripted_tokens(live.row.prompt, 3)


async def test_ring_that_holds_something_else_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = RingExecutor()
    async with forming(executor=executor) as live:
        await live.run_steps(2)
        monkeypatch.setattr("service_chassis.protocol.broadcast_ring.writer.checksum", lambda position, message: 1)
        live.send_step()
        loss = await live.lost(within_s=2.0)
        assert "RingCorrupted: reading deltas from shared memory: the chunk of message 2 holds " in loss.reason
        live.assert_tokens_exact()
    await assert_next_group_works()


async def test_rank_that_closes_its_end_is_lost_though_its_process_lives() -> None:
    executor = RingExecutor()
    async with forming(executor=executor) as live:
        await live.run_steps(1)
        # As if it had: the writer sees the same, an error on the pipe.
        assert executor.delta_broadcast is not None
        executor.delta_broadcast._writer._lose(1)
        loss = await live.lost(within_s=2.0)
        assert (loss.rank, loss.reason) == (
            1,
            "rank 1 exited: it closed its end of the broadcast ring",
        )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda delta: setattr(delta, "step", delta.step + 1), "OutOfOrder: step 3 is a gap: the expected step is 2"),
        (lambda delta: setattr(delta, "state_digest", 5), "DigestMismatch: step 2: state_digest="),
    ],
    ids=["gap", "digest"],
)
async def test_delta_that_is_refused_is_the_ranks_failure(spoil, reason: str) -> None:  # type: ignore[no-untyped-def]
    executor = RingExecutor(1)
    async with forming(executor=executor) as live:
        await live.run_steps(1)
        delta = SchedulerDelta.FromString(live.row.next().SerializeToString())
        spoil(delta)
        assert executor.delta_broadcast is not None
        assert live.facts is not None
        message = worker_pb2.StepsRequest(epoch=live.facts.epoch, delta=delta.SerializeToString())
        executor.delta_broadcast.send(message.SerializeToString())
        loss = await live.lost(within_s=2.0)
        assert reason in loss.reason


async def test_ring_is_refused_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.executors.multiproc.is_supported", lambda: False)
    executor = RingExecutor(1)
    live = LiveGroup(executor, replace(SETTINGS))
    await live.form()
    try:
        await live.run_steps(3)
        live.assert_tokens_exact()
        assert executor.delta_broadcast is None
        assert executor.written.count("delta") == 3
    finally:
        await live.group.teardown("the test is over")
