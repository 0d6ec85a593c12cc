"""A rank without a transport, as the executor ``uni`` calls it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from maniple.v1 import scheduler_delta_pb2, worker_pb2
from service_chassis.errors import Fenced, InvalidParameter, ManipleError, NotBuilt, WrongState
from service_chassis.scripted import ScriptedOptions, scripted_model
from support.formed_rank import LIMITS, STAGES, Feed, advance, request, started_rank
from support.waiting import until
from support.worker_process import DeltaMaker, Goodbye
from worker_service.config import WorkerConfig
from worker_service.heartbeat import Failure
from worker_service.model_files import read_model_files
from worker_service.runner import LoadOptions, ModelFacts, Progress
from worker_service.scripted import ScriptedRunner


async def test_stages_come_in_order_and_repeat_harmlessly() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", "Join")
        for done, method in enumerate(STAGES):
            for later in STAGES[done + 1 :]:
                with pytest.raises(WrongState):
                    await rank.call(later, request(later))
            await advance(rank, method, method)
        described = await rank.describe(worker_pb2.DescribeRequest())
        assert described.stage == worker_pb2.WORKER_STAGE_READY
        assert described.limits == LIMITS
        for earlier in STAGES[1:4]:
            with pytest.raises(WrongState, match="the rank is at WORKER_STAGE_READY"):
                await rank.call(earlier, request(earlier))


async def test_calls_with_a_stale_epoch_are_fenced() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", epoch=4)
        for method in [*STAGES, "FetchDeltas", "Leave"]:
            with pytest.raises(Fenced, match="epoch 3 is not valid here: epoch 4 is granted"):
                await rank.call(method, request(method, epoch=3))


async def test_new_formation_starts_over_with_the_weights_that_are_loaded() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", *STAGES)
        await advance(rank, "FormGroup", formation_id="f2")
        described = await rank.describe(worker_pb2.DescribeRequest())
        assert (described.stage, described.formation_id, described.accepted) == (1, "f2", 0)
        assert described.model.vocab_size == 260
        await advance(rank, *STAGES[1:])


async def test_stage_goes_on_when_its_caller_goes_away() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", "FormGroup")
        model = scripted_model(ScriptedOptions(load_time_s=0.2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await advance(rank, "LoadModel", model=model)
        assert rank.vitals.busy is not None
        await advance(rank, "LoadModel", model=model)  # waits for the first, and finds it loaded
        assert rank.vitals.busy is None


async def test_stage_that_waited_for_another_owners_load_is_fenced_by_then() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", "FormGroup")
        model = scripted_model(ScriptedOptions(load_time_s=0.2))
        loading = asyncio.create_task(advance(rank, "LoadModel", model=model))
        waiting = asyncio.create_task(advance(rank, "FormGroup", formation_id="f2"))
        await until(lambda: rank.vitals.busy is not None, "the load")
        await advance(rank, "Join", epoch=2, owner_id="B", force=True)
        with pytest.raises(Fenced):
            await waiting
        await loading
        assert rank.vitals.formation_id == "f1"


async def test_limits_must_fit_what_was_loaded() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", "FormGroup", "LoadModel", "ProfileMemory")
        for field, value in [("num_blocks", 1), ("block_size", 8), ("max_model_len", 4097), ("max_num_seqs", 6)]:
            limits = worker_pb2.GroupLimits()
            limits.CopyFrom(LIMITS)
            setattr(limits, field, value)
            with pytest.raises(InvalidParameter) as caught:
                await advance(rank, "AllocateKvCache", limits=limits)
            assert caught.value.field == f"limits.{field}"


async def test_every_call_of_the_protocol_has_a_method() -> None:
    async with started_rank() as rank:
        service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
        for method in service.methods:
            assert callable(rank.method(method.name))
        with pytest.raises(NotBuilt):
            await rank.call("UnloadLora", worker_pb2.WorkerServiceUnloadLoraRequest())


async def test_stream_opened_before_the_batch_exists_carries_its_results() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join")
        feed = Feed(rank)
        feed.send(hello=worker_pb2.StepsRequest.Hello(owner_id="A"))
        assert (await feed.until("welcome")).accepted == 0
        await advance(rank, *STAGES)
        feed.send(delta=DeltaMaker().make(new={1: [3, 4]}))
        assert (await feed.until("result")).step == 1


async def test_failure_is_reported_once_and_first_cause_stays() -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", *STAGES)
        feed = Feed(rank)
        feed.send(hello=worker_pb2.StepsRequest.Hello(owner_id="A"))
        await feed.until("welcome")
        feed.send(delta=b"\xff")
        assert "not a well-formed SchedulerDelta" in (await feed.until("report")).failure.message
        with pytest.raises(ManipleError):
            await feed.until("result")
        again = Feed(rank)
        again.send(hello=worker_pb2.StepsRequest.Hello(owner_id="A"))
        await again.until("welcome")
        assert (await again.until("report")).failure.kind == "DeltaRefused"  # at once, to whoever comes


async def test_orphan_wipes_what_users_sent_before_it_goes() -> None:
    reasons: list[str] = []
    async with started_rank(WorkerConfig(), reasons.append) as rank:
        await advance(rank, "Join", lease_ms=100)
        await advance(rank, *STAGES)
        feed = Feed(rank)
        feed.send(hello=worker_pb2.StepsRequest.Hello(owner_id="A"))
        await feed.until("welcome")
        maker = DeltaMaker()
        feed.send(delta=maker.make(new={0: [3, 4], 1: [5]}))
        await feed.until("result")
        feed.send(delta=maker.make(finished=[1], mode=scheduler_delta_pb2.SchedulerDelta.MODE_APPLY_ONLY))
        await until(lambda: len(rank.tombstones) == 1, "the tombstone")
        rank.config = WorkerConfig(orphan_grace_s=0.2)  # not before: what comes above may take longer
        await until(lambda: reasons, "its leaving")
        assert "no owner for" in reasons[0]
        assert len(rank.tombstones) == 0
        assert (await rank.describe(worker_pb2.DescribeRequest())).num_rows == 0
        told = [part async for part in rank.snapshot(request("Snapshot"))]
        assert [part.WhichOneof("part") for part in told] == ["header"]
        assert told[0].header.step == 0


async def test_model_files_are_sent_whole_and_nothing_outside_the_directory(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000  # more than one chunk
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "empty.txt").write_bytes(b"")
    parts = [part async for part in read_model_files(str(tmp_path), ["tokenizer.json", "absent", "empty.txt"])]
    assert b"".join(part.chunk for part in parts if part.name == "tokenizer.json") == content
    assert {part.sha256 for part in parts[:-1]} == {hashlib.sha256(content).digest()}
    assert (parts[-1].name, parts[-1].size_bytes) == ("empty.txt", 0)
    for name in ("../secret", "/etc/passwd", "..", ""):
        with pytest.raises(InvalidParameter):
            await anext(read_model_files(str(tmp_path), [name]))
    assert [part async for part in read_model_files("", ["tokenizer.json"])] == []


class _Meeting(ScriptedRunner):
    """A model whose ranks meet while they load."""

    def load_model(self, options: LoadOptions, progress: Progress) -> ModelFacts:
        self._group.barrier()
        return super().load_model(options, progress)


async def test_stage_that_waits_for_a_rank_gives_way_to_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: str, config: WorkerConfig) -> _Meeting:
        return _Meeting(ScriptedOptions(), rank=config.rank)

    monkeypatch.setattr("worker_service.stages.make_runner", make)
    configs = [WorkerConfig(rank=rank, world_size=2) for rank in range(2)]
    async with asyncio.timeout(20), started_rank(configs[0]) as first, started_rank(configs[1]) as second:
        ranks = (first, second)

        async def both(method: str, **fields: Any) -> list[Any]:
            calls = [
                rank.call(method, request(method, **fields, **({"rank": index} if "rank" in needs(method) else {})))
                for index, rank in enumerate(ranks)
            ]
            return list(await asyncio.gather(*calls))

        joined = await both("Join", world_size=2)
        where = f"127.0.0.1{joined[0].rendezvous}"
        await both("FormGroup", world_size=2, rendezvous=where)
        loading = asyncio.ensure_future(first.call("LoadModel", request("LoadModel")))  # and then A is gone
        await until(lambda: first.vitals.busy is not None, "the load")
        await both("Join", epoch=2, owner_id="B", force=True, world_size=2)
        with pytest.raises(WrongState, match="load: the owner was replaced"):
            await loading
        await both("FormGroup", epoch=2, formation_id="f2", world_size=2, rendezvous=where)
        await both("LoadModel", epoch=2)
        assert [rank.vitals.failure for rank in ranks] == [None, None]


def needs(method: str) -> set[str]:
    return set(getattr(worker_pb2, f"{method}Request").DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("kind", ["BrokenCollective", "RuntimeError"])
async def test_rank_that_failed_because_another_left_is_formed_again_once_it_was_released(kind: str) -> None:
    async with started_rank() as rank:
        await advance(rank, "Join", *STAGES)
        rank._fail(Failure(kind, "the connection to rank 1 broke", 3))
        rank._on_goodbye(Goodbye.KIND_RELEASE)
        await advance(rank, "Join", epoch=2, owner_id="B")
        if kind == "BrokenCollective":
            await advance(rank, *STAGES, epoch=2)
            assert rank.vitals.failure is None
        else:
            with pytest.raises(WrongState, match="the rank failed"):
                await advance(rank, "FormGroup", epoch=2)
