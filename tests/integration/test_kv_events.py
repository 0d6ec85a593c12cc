"""``VllmEngine.SubscribeKvEvents`` and ``GetLoads`` over real sockets and groups, with load behind them."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from control_plane import kv_event_log
from control_plane.doors.calls import Context
from control_plane.doors.served_model import ServedModel
from control_plane.doors.vllm_engine import VllmEngineDoor
from service_chassis.errors import EventsLost
from service_chassis.protocol.block_hash import block_hash, namespace_of, root_hash
from service_chassis.scripted import fail_at
from support.faults import model_with
from support.real_doors import RealDoors, real_doors
from support.scripted_reference import greedy
from support.waiting import until

PROMPT = [5, 250, 17, 0, 9, 11]
SLOW = model_with(step_time_s=0.005)


def names_of(ids: list[int], namespace: bytes = b"") -> list[int]:
    """The full blocks of a text, as the contract names them."""
    names, parent = [], root_hash(namespace)
    for start in range(0, len(ids) - 3, 4):
        parent = block_hash(parent, ids[start : start + 4])
        names.append(int.from_bytes(parent[:8], "little", signed=True))
    return names


class Subscriber:
    """Keeps what a gateway would: an index of blocks by group, and the last number."""

    def __init__(self, doors: RealDoors, start: int = 0) -> None:
        self.index: dict[int, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.last: dict[int, int] = {}
        self.batches: list[common_pb2.KvEventBatch] = []
        self.loads: list[common_pb2.EngineLoad] = []
        self.error: grpc.aio.AioRpcError | None = None
        self.call = doors.vllm.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for batch in self.call:
                self._take(batch)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass

    def _take(self, batch: common_pb2.KvEventBatch) -> None:
        rank = batch.dp_rank
        self.batches.append(batch)
        if batch.HasField("load"):
            self.loads.append(batch.load)
            if batch.load.load_only:
                assert batch.sequence_number == self.last[rank]
                assert not batch.events
                return
        if rank in self.last:
            assert batch.sequence_number == self.last[rank] + 1, "a gap, or one told twice"
        self.last[rank] = batch.sequence_number
        index = self.index.setdefault(rank, {})
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    index.clear()
                case "removed":
                    for name in event.removed.block_hashes:
                        del index[name]
                case "stored":
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    for block in event.stored.blocks:
                        assert block.block_size == len(block.token_ids) == 4
                        index[block.block_hash] = (parent, tuple(block.token_ids))
                        parent = block.block_hash


def held(doors: RealDoors, index: int = 0) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """What the scheduler of a group says that it has named."""
    stored, unknown = doors.running.groups[index].engines[-1].stored_blocks()
    assert not unknown
    short = {event.name: int.from_bytes(event.name[:8], "little", signed=True) for event in stored}
    return {
        short[event.name]: (
            short[event.contents.parent] if event.contents.parent else None,
            tuple(memoryview(event.contents.token_ids).cast("I")),
        )
        for event in stored
    }


async def generate(doors: RealDoors, request_id: str, prompt: list[int], max_tokens: int, **wanted: Any) -> None:
    async for _ in doors.generate(request_id, prompt, max_tokens, **wanted):
        pass


async def test_subscriber_begins_with_what_is_there_and_follows_every_change() -> None:
    async with real_doors(num_kv_blocks=30) as doors, asyncio.timeout(30):
        await generate(doors, "before", PROMPT, 12)
        subscriber = Subscriber(doors)
        expected = names_of([*PROMPT, *greedy(PROMPT, 11)])  # the last token is never computed
        await until(lambda: list(subscriber.index.get(0, {})) == expected, "the snapshot")
        first = subscriber.batches[0]
        assert first.events[0].HasField("cleared")
        assert len(first.events) == 2  # one chain is one event
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 4)
        assert first.snapshot.unknown_before == 0
        # More than fits: what is old goes.
        for number in range(12):
            await generate(doors, f"r{number}", [number, *PROMPT], 20)
        await until(lambda: subscriber.index[0] == held(doors), "both indexes agree")
        assert expected[-1] not in subscriber.index[0]
        # The reset goes through the same way.
        answer = await doors.vllm.FlushCache(common_pb2.FlushCacheRequest())
        assert answer.success
        await until(lambda: subscriber.index[0] == {}, "the flush")
        await generate(doors, "salted", PROMPT, 4, cache_salt="x")
        salted = names_of([*PROMPT, *greedy(PROMPT, 3)], namespace_of("", "x"))
        await until(lambda: list(subscriber.index[0]) == salted, "the salted blocks")
        stored = [event.stored for batch in subscriber.batches for event in batch.events if event.HasField("stored")]
        assert stored[-1].cache_salt == namespace_of("", "x").hex()
        subscriber.call.cancel()
        engine = doors.running.groups[0].engines[-1]
        await until(lambda: engine._block_listener is None, "nobody follows, nothing is recorded")


async def test_snapshot_of_many_blocks_comes_in_numbered_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.doors.kv_event_messages._BLOCKS_PER_CHUNK", 3)
    async with real_doors() as doors, asyncio.timeout(30):
        await generate(doors, "a", PROMPT, 30)
        await generate(doors, "b", [1, *PROMPT], 30)
        subscriber = Subscriber(doors)
        await until(lambda: len(subscriber.index.get(0, {})) == len(held(doors)), "the snapshot")
        assert subscriber.index[0] == held(doors)
        parts = [batch.snapshot for batch in subscriber.batches]
        assert [part.index for part in parts] == list(range(len(parts)))
        assert {(part.count, part.blocks) for part in parts} == {(len(parts), len(held(doors)))}
        assert len(parts) > 3
        # It goes on after the last part, without a gap; another one may go on from there too.
        await generate(doors, "c", [2, *PROMPT], 5)
        await until(lambda: subscriber.index[0] == held(doors), "what came after")
        again = Subscriber(doors, start=parts[-1].index + subscriber.batches[0].sequence_number)
        await until(lambda: len(again.index.get(0, {})) == 2, "only what came after")
        assert not again.batches[0].HasField("snapshot")


async def test_subscriber_who_does_not_read_is_told_so_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_log.KvEventLog.__init__, "__defaults__", (400,))
    async with real_doors(max_model_len=1000, num_kv_blocks=3000) as doors, asyncio.timeout(60):
        # What the transport would buffer is left out: the handler itself stands where it writes its first message.
        door = VllmEngineDoor(doors.fleet, cast(ServedModel, None), version="0")
        lazy = door.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), cast(Context, AsyncMock()))
        begin = (await anext(lazy)).sequence_number
        subscriber = Subscriber(doors)
        await until(lambda: 0 in subscriber.last, "the quick one")
        for number in range(200):
            if subscriber.last[0] > begin + 500:
                break
            await asyncio.gather(*(generate(doors, f"{number}-{n}", [n, number], 100) for n in range(8)))
        await until(lambda: subscriber.index[0] == held(doors), "the quick one has it all")
        with pytest.raises(EventsLost, match="behind"):
            await anext(lazy)


async def test_groups_count_each_for_itself_and_one_that_is_lost_is_cleared() -> None:
    dies = model_with(fail_at(0, 40), step_time_s=0.002)
    async with real_doors(SLOW, [dies, SLOW]) as doors, asyncio.timeout(30):
        subscriber = Subscriber(doors)
        await until(lambda: len(subscriber.last) == 2, "both snapshots")
        await asyncio.gather(*(generate(doors, f"r{n}", [n, *PROMPT], 12) for n in range(2)))
        await until(lambda: all(subscriber.index[n] == held(doors, n) != {} for n in range(2)), "both caches")
        await asyncio.gather(*(generate(doors, f"s{n}", [n, *PROMPT], 60) for n in range(4)))
        await doors.running.formed_anew(1)
        await until(lambda: all(subscriber.index[n] == held(doors, n) for n in range(2)), "after the loss")
        assert not subscriber.task.done()
        # A gateway that routes by this sends its requests where it wants them.
        for rank in (1, 0):
            wanted = pb.GenerateRequest(
                request_id=f"pinned-{rank}",
                tokenized=pb.TokenizedInput(input_ids=[77, rank, *PROMPT]),
                sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
                data_parallel_rank=rank,
            )
            assert [one async for one in doors.vllm.Generate(wanted)]
            (name,) = names_of([77, rank, *PROMPT][:4])
            await until(lambda name=name, rank=rank: name in subscriber.index[rank], "where it was sent")  # type: ignore[misc]
            assert name not in subscriber.index[1 - rank]


async def test_load_is_told_again_and_again_and_is_that_of_the_poll() -> None:
    async with real_doors(SLOW, max_num_seqs=2) as doors, asyncio.timeout(30):
        subscriber = Subscriber(doors)
        streams = [doors.generate(f"r{n}", [n, *PROMPT], 3000) for n in range(5)]
        status = doors.fleet.status
        await until(lambda: (status().num_running, status().num_waiting) == (2, 3), "two run, three wait")
        loads = (await doors.vllm.GetLoads(pb.GetLoadsRequest())).loads
        (load,) = loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 3, 5)
        assert load.num_waiting_uncached_tokens == 3 * 7
        assert (load.max_running_requests, load.utilization, load.max_total_num_tokens) == (2, 1.0, 399 * 4)
        view = status().groups[0].engine
        assert view is not None
        in_use = 399 - view.num_free_blocks - view.num_cached_blocks
        assert 0 <= in_use * 4 - load.num_used_tokens <= 16  # a step may have passed
        assert load.token_usage == pytest.approx(load.num_used_tokens / (399 * 4))
        await until(lambda: any(one.waiting_requests == 3 for one in subscriber.loads), "the load, pushed")
        assert (await doors.vllm.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 5
        for stream in streams:
            stream.cancel()
        await until(
            lambda: subscriber.loads[-1].load_only and not subscriber.loads[-1].running_requests, "an idle heartbeat"
        )
        (load,) = (await doors.vllm.GetLoads(pb.GetLoadsRequest())).loads
        assert (load.num_total_reqs, load.num_used_tokens, load.num_waiting_uncached_tokens) == (0, 0, 0)
        assert [one.sample for one in subscriber.loads] == sorted(one.sample for one in subscriber.loads)


async def test_without_a_group_there_is_nothing_to_follow() -> None:
    async with real_doors() as doors, asyncio.timeout(30):
        subscriber = Subscriber(doors)
        await until(lambda: subscriber.last, "the snapshot")
        doors.fleet.leave("the group is formed anew")
        await subscriber.task
        assert subscriber.error is not None
        assert subscriber.error.code() is grpc.StatusCode.UNAVAILABLE
        late = Subscriber(doors)
        await late.task
        assert late.error is not None
        assert "formed anew" in (late.error.details() or "")
