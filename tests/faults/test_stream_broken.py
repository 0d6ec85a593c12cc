"""A Steps stream breaks after a step was executed and before its result was read (cases A12)."""

from __future__ import annotations

from control_plane.executors.base import StepsConnection
from control_plane.executors.multiproc import MultiprocExecutor
from maniple.v1 import worker_pb2
from service_chassis.ids import Rank
from support.faults import WORKER, assert_next_group_works, forming
from support.waiting import until


class LosingConnection:
    """A stream that breaks in place of the message that ``loses`` picks."""

    def __init__(self, inner: StepsConnection, owner: BreakingExecutor) -> None:
        self._inner = inner
        self._owner = owner

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        if self._owner.lose_delta > 0 and message.WhichOneof("message") == "delta":
            self._owner.lose_delta -= 1
            await self._break()
        await self._inner.write(message)

    async def read(self) -> worker_pb2.StepsResponse | None:
        message = await self._inner.read()
        if message is not None and message.HasField("result") and message.result.step in self._owner.lose_results:
            self._owner.lose_results.remove(message.result.step)
            await self._break()
        return message

    async def _break(self) -> None:
        self._owner.num_breaks += 1
        await self._inner.close()
        raise ConnectionError("broken on purpose")

    async def close(self) -> None:
        await self._inner.close()


class BreakingExecutor(MultiprocExecutor):
    """Child processes behind streams that break on request."""

    def __init__(self) -> None:
        super().__init__(world_size=1, settings=WORKER)
        self.lose_results: set[int] = set()
        self.lose_delta = 0
        self.num_breaks = 0

    async def open_steps(self, rank: Rank) -> StepsConnection:
        return LosingConnection(await super().open_steps(rank), self)


async def test_unread_results_are_resent_and_no_token_is_missing_or_twice() -> None:
    executor = BreakingExecutor()
    async with forming(executor=executor) as live:
        executor.lose_results = {2, 3, 7}
        for _ in range(8):
            live.send_step()
        await until(lambda: 8 in live.result_steps, "all results")
        assert executor.num_breaks == 3
        live.assert_tokens_exact()
        assert len(live.tokens) == 8
        assert not live.losses
        await live.run_steps(10)  # over a block's end, on the last stream
        live.assert_tokens_exact()
        assert not live.losses
    await assert_next_group_works()


async def test_lost_deltas_are_resent_from_what_the_rank_accepted() -> None:
    executor = BreakingExecutor()
    async with forming(executor=executor) as live:
        await live.run_steps(1)
        executor.lose_delta = 2
        for _ in range(4):
            live.send_step()
        await until(lambda: 5 in live.result_steps, "all results")
        assert executor.num_breaks == 2
        await live.run_steps(3)
        live.assert_tokens_exact()
        assert not live.losses
    await assert_next_group_works()
