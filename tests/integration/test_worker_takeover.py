"""A group changes hands, in plain protocol messages: real worker processes, one owner after another (PROTOCOL C)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from maniple.v1 import worker_pb2, worker_pb2_grpc
from service_chassis.protocol.block_hash import block_hash, root_hash
from service_chassis.scripted import ScriptedOptions, fail_at
from support.raw_owner import LEASE_MS, RawOwner, snapshot_of, worker_processes
from support.scripted_reference import greedy
from support.waiting import until
from support.worker_process import DEADLINE_S, Delta, DeltaMaker, Goodbye, Hello, RawSteps, WorkerProcess, refusal_of

PROMPT = [5, 250, 17, 0, 5]
OTHER = [9, 8, 7]
LEASE_S = LEASE_MS / 1000


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return refusal_of(caught.value)


async def silent_for(worker: WorkerProcess, silent_ms: int) -> worker_pb2.DescribeResponse:
    """Wait until a rank has not heard of its owner for so long."""
    for _ in range(round(DEADLINE_S / 0.05)):
        described = await worker.describe()
        if described.owner_silent_for_ms >= silent_ms:
            return described
        await asyncio.sleep(0.05)
    raise AssertionError(f"the owner was never silent for {silent_ms} ms")


@asynccontextmanager
async def running_group(
    directory: Path, world_size: int, options: ScriptedOptions | None = None, *flags: str
) -> AsyncIterator[tuple[RawOwner, DeltaMaker]]:
    """A group whose owner A has two rows in the batch: ``PROMPT`` in row 2 got three tokens, ``OTHER`` in row 0 two."""
    async with worker_processes(directory, world_size, *flags) as workers:
        owner = RawOwner(workers, "A", 1)
        await owner.form(options)
        maker = DeltaMaker()
        await owner.run(maker, 1, new={2: PROMPT})
        await owner.run(maker, 2, new={0: OTHER})
        yield owner, maker
        await owner.fall_silent()


@pytest.mark.parametrize("world_size", [1, 2])
async def test_adopter_goes_on_with_every_token_after_the_owner_died(tmp_path: Path, world_size: int) -> None:
    async with running_group(tmp_path, world_size) as (owner, maker):
        await owner.run(maker, 1, finished=[0])
        await owner.run(maker, 1, new={1: [1, 2]})
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        taken = await adopter.take_over()
        assert taken.tokens(2) == PROMPT + greedy(PROMPT, 5)
        assert taken.tokens(1) == [1, 2, *greedy([1, 2], 1)]
        assert taken.rows[2].request.control_blob == b"blob of row 2"
        [stone] = taken.tombstones
        assert list(stone.token_ids) == OTHER + greedy(OTHER, 2)
        assert (stone.num_prompt_tokens, stone.control_blob) == (len(OTHER), b"blob of row 0")
        assert taken.hashes == {3: block_hash(root_hash(b""), [*OTHER, greedy(OTHER, 1)[0]])}
        tokens = await adopter.run(taken.delta_maker(), 4)
        expected = zip(greedy([1, 2], 5)[1:], greedy(PROMPT, 9)[5:], strict=True)
        assert tokens == [list(step) for step in expected]
        described = [await worker.describe() for worker in owner.workers]
        assert {(d.epoch, d.owner_address, d.num_rows, d.num_tombstones) for d in described} == {(2, "B:1", 2, 1)}
        await adopter.die()


@pytest.mark.parametrize("reached", [0, 1])
async def test_step_that_only_one_rank_got_is_relayed_to_the_other(tmp_path: Path, reached: int) -> None:
    """A11: the owner is killed between two sends; the rank that has the step may wait in a collective for just that."""
    async with running_group(tmp_path, 2) as (owner, maker):
        last, bookkeeping = maker.make(), maker.make(finished=[0], mode=Delta.MODE_APPLY_ONLY)
        await owner.send(last, [reached])
        await owner.send(bookkeeping, [reached])
        report = await owner.workers[reached].report_where(lambda report: report.running_for_ms > 100)
        assert (report.running_step, report.accepted, report.completed) == (4, 5, 3)
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        taken = await adopter.take_over()
        assert [joined.accepted for joined in adopter.joined] == [5 if rank == reached else 3 for rank in range(2)]
        for worker in owner.workers:  # byte-identical, whoever was told by whom
            request = worker_pb2.FetchDeltasRequest(epoch=2, from_step=4)
            fetched = await worker.stub.FetchDeltas(request, timeout=DEADLINE_S)
            assert list(fetched.deltas) == [last, bookkeeping]
        assert taken.tokens(2) == PROMPT + greedy(PROMPT, 4)
        assert list(taken.tombstones[0].token_ids) == OTHER + greedy(OTHER, 3)
        assert await adopter.run(taken.delta_maker(), 2) == [[token] for token in greedy(PROMPT, 6)[4:]]
        await adopter.die()


async def test_result_that_nobody_read_is_in_the_snapshot(tmp_path: Path) -> None:
    """A12, across owners: steps were executed, their results were on the way when the owner died."""
    async with running_group(tmp_path, 1) as (owner, maker):
        for _ in range(3):
            await owner.send(maker.make())
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        taken = await adopter.take_over()
        told = len(taken.tokens(2)) - len(PROMPT)
        assert taken.header.step == told  # of what arrived, nothing is missing
        assert taken.tokens(2) == PROMPT + greedy(PROMPT, told)
        assert (await adopter.run(taken.delta_maker(), 1))[0][1] == greedy(PROMPT, told + 1)[-1]
        await adopter.die()


async def test_deltas_are_relayed_while_the_device_is_busy(tmp_path: Path) -> None:
    async with running_group(tmp_path, 1, ScriptedOptions(step_time_s=0.3)) as (owner, maker):
        for _ in range(3):
            await owner.send(maker.make())
        await owner.workers[0].report_where(lambda report: report.accepted == 6)
        await owner.say_goodbye(Goodbye.KIND_HANDOVER)
        adopter = RawOwner(owner.workers, "B", 2)
        await adopter.claim()
        assert adopter.joined[0].completed < adopter.joined[0].accepted == 6
        taken_early = await snapshot_of(owner.workers[0], 2)
        assert taken_early.header.step == adopter.joined[0].completed
        last = await adopter.level_up()
        await adopter.completed(last)
        taken = await snapshot_of(owner.workers[0], 2)
        assert taken.tokens(2) == PROMPT + greedy(PROMPT, 6)
        assert taken_early.tokens(2) == taken.tokens(2)[: len(taken_early.tokens(2))]
        await adopter.die()


async def test_old_owner_that_wakes_up_is_fenced_on_every_path(tmp_path: Path) -> None:
    """The owner was stopped past its lease; its connections stand, and what it says comes too late."""
    async with running_group(tmp_path, 2) as (owner, maker):
        await owner.fall_silent()
        adopter = RawOwner(owner.workers, "B", 2)
        taken = await adopter.take_over()
        late = maker.make()
        for rank, stream in enumerate(owner.streams):
            end = await stream.end()
            assert end is not None
            assert (end.code, end.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FENCED")
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await stream.send(delta=late)
            again = RawSteps(owner.workers[rank].stub, 1)
            await again.send(hello=Hello(owner_id="A"))
            refusal = await again.end()
            assert refusal is not None
            assert refusal.reason == "FENCED"
        leave = owner.workers[1].stub.Leave(worker_pb2.LeaveRequest(epoch=1, reason="none of your business"))
        assert (await refused(leave)).reason == "FENCED"
        # Nothing of that disturbed the new owner.
        expected = zip(greedy(OTHER, 5)[2:], greedy(PROMPT, 6)[3:], strict=True)
        assert await adopter.run(taken.delta_maker(), 3) == [list(step) for step in expected]
        await adopter.die()


async def test_owner_whose_lease_lapsed_goes_on_where_nobody_claimed(tmp_path: Path) -> None:
    async with running_group(tmp_path, 1) as (owner, maker):
        await owner.fall_silent()
        await silent_for(owner.workers[0], 2 * LEASE_MS)
        assert await owner.run(maker, 1) == [[greedy(OTHER, 3)[2], greedy(PROMPT, 4)[3]]]
        assert (await refused(RawOwner(owner.workers, "B", 2).claim())).reason == "LEASE_HELD"


async def test_two_adopters_race_and_one_gets_the_group(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as (owner, _):
        await owner.die()
        candidates = [RawOwner(owner.workers, name, 2) for name in "BC"]

        async def contend(candidate: RawOwner) -> Any:
            try:
                return await candidate.take_over()
            except AssertionError as error:
                return error
            except grpc.aio.AioRpcError as error:
                return refusal_of(error)

        outcomes = await asyncio.gather(*(contend(candidate) for candidate in candidates))
        losers = [outcome for outcome in outcomes if not hasattr(outcome, "rows")]
        assert len(losers) == 1
        winner = candidates[1 - outcomes.index(losers[0])]
        loser = candidates[outcomes.index(losers[0])]
        assert not loser.joined  # it got no rank at all
        described = [await worker.describe() for worker in owner.workers]
        assert {one.owner_address for one in described} == {f"{winner.owner_id}:1"}
        [taken] = [outcome for outcome in outcomes if hasattr(outcome, "rows")]
        assert (await winner.run(taken.delta_maker(), 1)) == [[greedy(OTHER, 3)[2], greedy(PROMPT, 4)[3]]]
        await winner.die()


@pytest.mark.parametrize(
    "point", ["one rank joined", "all joined", "half relayed", "level", "adopted", "first delta sent"]
)
async def test_next_adopter_does_the_same_where_the_first_died(tmp_path: Path, point: str) -> None:
    """A13, the adopter's part: at every point of its takeover."""
    async with running_group(tmp_path, 2) as (owner, maker):
        await owner.send(maker.make(), [0])
        await owner.send(maker.make(), [0])
        await owner.workers[0].report_where(lambda report: report.accepted == 5)
        await owner.die()
        first = RawOwner(owner.workers, "B", 2)
        num_tokens = 5
        if point == "one rank joined":
            await first.join_when_lapsed(0)
        elif point == "first delta sent":
            taken = await first.take_over()
            await first.send(taken.delta_maker().make(), [0])
            await owner.workers[0].report_where(lambda report: report.accepted == 6)
            num_tokens = 6
        elif point == "adopted":
            await first.take_over()
        else:
            await first.claim_when_lapsed()
            if point == "half relayed":
                request = worker_pb2.FetchDeltasRequest(epoch=2, from_step=4)
                fetched = await owner.workers[0].stub.FetchDeltas(request, timeout=DEADLINE_S)
                await first.open(last_result_step=5)
                await first.send(fetched.deltas[0], [1])
                await owner.workers[1].report_where(lambda report: report.accepted == 4)
            elif point == "level":
                await first.level_up()
        await first.die()
        second = RawOwner(owner.workers, "C", 3)
        taken = await second.take_over()
        assert taken.header.step == num_tokens
        assert taken.tokens(2) == PROMPT + greedy(PROMPT, num_tokens)
        expected = greedy(OTHER, num_tokens)[-1], greedy(PROMPT, num_tokens + 1)[-1]
        assert await second.run(taken.delta_maker(), 1) == [list(expected)]
        await second.die()


async def test_same_owner_may_ask_again_and_nothing_ends(tmp_path: Path) -> None:
    async with running_group(tmp_path, 1) as (owner, maker):
        first = owner.joined[0]
        [again] = await owner.claim()
        assert (again.epoch, again.incarnation_id, again.formation_id) == (1, first.incarnation_id, "f1")
        assert (again.accepted, again.completed, again.state_digest) == (3, 3, maker.digest.value)
        assert await owner.run(maker, 1) == [[greedy(OTHER, 3)[2], greedy(PROMPT, 4)[3]]]  # its stream lives


async def test_stopped_worker_does_not_take_its_own_absence_for_the_owners(tmp_path: Path) -> None:
    """A late watcher has no opinion: the owner's heartbeats lay in the socket, and so did a rival's Join."""
    async with running_group(tmp_path, 1) as (owner, maker):
        process = owner.workers[0].process
        os.kill(process.pid, signal.SIGSTOP)
        rival = asyncio.create_task(RawOwner(owner.workers, "B", 2).claim())
        await asyncio.sleep(2 * LEASE_S)  # the clock is the subject
        os.kill(process.pid, signal.SIGCONT)
        assert (await refused(rival)).reason == "LEASE_HELD"
        assert await owner.run(maker, 1) == [[greedy(OTHER, 3)[2], greedy(PROMPT, 4)[3]]]


async def test_survivor_in_a_dead_collective_tells_what_was_completed(tmp_path: Path) -> None:
    """The other rank is stopped, so the device thread never comes back: the snapshot does not need it."""
    async with running_group(tmp_path, 2) as (owner, maker):
        os.kill(owner.workers[1].process.pid, signal.SIGSTOP)
        await owner.send(maker.make(finished=[0]), [0])
        await owner.send(maker.make(), [0])
        await owner.workers[0].report_where(lambda report: report.running_for_ms > 50)
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        await adopter.join_when_lapsed(0)
        taken = await snapshot_of(owner.workers[0], 2)
        assert taken.header.step == 3
        assert taken.token_digest() == taken.header.token_digest
        assert (taken.tokens(0), taken.tokens(2)) == (OTHER + greedy(OTHER, 2), PROMPT + greedy(PROMPT, 3))
        assert not taken.tombstones
        await owner.workers[0].stub.Leave(worker_pb2.LeaveRequest(epoch=2, reason="rank 1 is gone"))
        assert await owner.workers[0].exit_code(2) == 0


async def test_failed_rank_still_tells_what_it_completed(tmp_path: Path) -> None:
    options = ScriptedOptions(faults=(fail_at(0, 4),))
    async with running_group(tmp_path, 1, options) as (owner, maker):
        await owner.send(maker.make())
        await owner.streams[0].report_where(lambda report: report.HasField("failure"))
        taken = await snapshot_of(owner.workers[0], 1)
        assert (taken.header.step, taken.tokens(2)) == (3, PROMPT + greedy(PROMPT, 3))


async def test_group_that_lapsed_before_it_was_ready_is_formed_anew(tmp_path: Path) -> None:
    options = ScriptedOptions(load_time_s=0.3)
    async with worker_processes(tmp_path, 2) as workers:
        owner = RawOwner(workers, "A", 1)
        await owner.claim()
        await owner.form_group()
        await owner.load(options)
        # Nothing was ever said on Steps, and calls renew no lease.
        adopter = RawOwner(workers, "B", 2)
        await adopter.claim_when_lapsed()
        assert {(j.stage, j.formation_id) for j in adopter.joined} == {(worker_pb2.WORKER_STAGE_LOADED, "f1")}
        described = [await worker.describe() for worker in workers]
        assert {(d.stage, d.formation_id) for d in described} == {(worker_pb2.WORKER_STAGE_LOADED, "f1")}
        assert not any(d.HasField("limits") for d in described)
        await adopter.open()
        began = time.monotonic()
        await adopter.reach_ready(options, formation_id="f2")
        assert time.monotonic() - began < 0.25  # nothing was loaded again
        [token] = await adopter.run(DeltaMaker(), 1, new={0: PROMPT})
        assert token == greedy(PROMPT, 1)
        await adopter.die()


async def test_formation_that_waits_for_a_missing_rank_gives_way_to_the_next_owner(tmp_path: Path) -> None:
    async with worker_processes(tmp_path, 3) as workers:
        owner = RawOwner(workers, "A", 1)
        await owner.claim()
        request = worker_pb2.FormGroupRequest(
            epoch=1, formation_id="f1", world_size=3, rendezvous=f"127.0.0.1{owner.joined[0].rendezvous}"
        )
        forming = []
        for rank in range(2):  # and then A is gone; rank 2 never hears of it
            request.rank = rank
            forming.append(asyncio.ensure_future(workers[rank].stub.FormGroup(request, timeout=DEADLINE_S)))
            await workers[rank].report_where(lambda report: report.busy.what == "form")
        adopter = RawOwner(workers, "B", 2)
        await adopter.claim_when_lapsed()
        granted_at = time.monotonic()
        await adopter.reach_ready(formation_id="f2")
        assert time.monotonic() - granted_at < DEADLINE_S / 2  # and not after the time that A gave it
        for call in forming:
            assert (await refused(call)).reason == "WRONG_STATE"
        await adopter.open()
        maker = DeltaMaker()
        assert await adopter.run(maker, 3, new={0: PROMPT}) == [[token] for token in greedy(PROMPT, 3)]
        await adopter.die()


async def test_released_group_keeps_tombstones_and_weights_also_from_a_step_that_hung(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as (owner, maker):
        await owner.run(maker, 1, finished=[0])
        await owner.send(maker.make(), [0])  # rank 0 waits for rank 1, in vain
        await owner.workers[0].report_where(lambda report: report.running_step == 5)
        assert await owner.say_goodbye(Goodbye.KIND_RELEASE) == [None, None]
        described = [await worker.describe() for worker in owner.workers]
        assert {(d.num_rows, d.num_tombstones, d.formation_id, d.owner_address) for d in described} == {(0, 1, "", "")}
        adopter = RawOwner(owner.workers, "B", 2)
        await adopter.claim()
        taken = await snapshot_of(owner.workers[0], 2)
        assert list(taken.tombstones[0].token_ids) == OTHER + greedy(OTHER, 2)
        assert (taken.header.step, taken.rows, taken.hashes) == (0, {}, {})
        await adopter.reach_ready(formation_id="f2")
        await adopter.open()
        assert await adopter.run(DeltaMaker(), 1, new={3: PROMPT}) == [greedy(PROMPT, 1)]
        await adopter.die()


async def test_snapshot_is_for_the_owner_only(tmp_path: Path) -> None:
    async with running_group(tmp_path, 1) as (owner, _):
        for epoch in (0, 2):
            refusal = await refused(snapshot_of(owner.workers[0], epoch))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FENCED")


@pytest.mark.parametrize("flags", [(), ("--allow-plaintext-snapshot",)])
async def test_snapshot_does_not_leave_in_plaintext_unless_it_may(tmp_path: Path, flags: tuple[str, ...]) -> None:
    address = address_of_this_machine()
    if address is None:
        pytest.skip("this machine has no address but the loopback")
    async with worker_processes(tmp_path, 1, "--listen", "0.0.0.0:0", "--allow-plaintext-listen", *flags) as workers:
        port = await port_of(workers[0])
        for host, allowed in (("127.0.0.1", True), (address, bool(flags))):
            async with grpc.aio.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
                stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
                join = worker_pb2.JoinRequest(epoch=1, owner_id="A", protocol_version=1, world_size=1)
                await stub.Join(join, timeout=DEADLINE_S)
                call = stub.Snapshot(worker_pb2.SnapshotRequest(epoch=1), timeout=DEADLINE_S)
                if allowed:
                    assert (await call.read()).WhichOneof("part") == "header"
                else:
                    refusal = await refused(call.read())
                    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
                    assert "--allow-plaintext-snapshot" in refusal.message


def address_of_this_machine() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel says which address it would send from
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


async def port_of(worker: WorkerProcess) -> str:
    """Read from a worker's log where it listens."""

    def listening() -> list[str]:
        return [line["address"] for line in worker.log if line.get("event") == "worker.listening"]

    await until(listening, "the worker to listen")
    return listening()[0].rpartition(":")[2]


async def test_orphan_keeps_all_for_its_grace_and_then_goes(tmp_path: Path) -> None:
    async with running_group(tmp_path, 1, None, "--orphan-grace-s", "1.5") as (owner, _):
        began = time.monotonic()
        await owner.die()
        worker = owner.workers[0]
        assert (await silent_for(worker, 2 * LEASE_MS)).num_rows == 2
        assert await worker.exit_code(DEADLINE_S) == 0
        assert time.monotonic() - began >= 1.4
        await until(lambda: any("no owner" in line.get("reason", "") for line in worker.log), "the reason in the log")
