"""A group is lost while another one lives: its requests go on there, and their clients notice a pause at most."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.generation import Chunk, FinishReason, Generation, TextChoice
from control_plane.generation_stream import GenerationStream
from control_plane.group.loss import LossKind, LossReason
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from service_chassis.errors import DuplicateRequest, GroupLost, GroupLostBeforeStart, TakenOver
from service_chassis.ids import RequestId
from service_chassis.scripted import fail_at
from support.engine_harness import END, Collected, collect, generation, running_engine
from support.faults import model_with
from support.fleet_harness import RunningFleet, running_fleet
from support.remote_ranks import remote_ranks
from support.scripted_reference import greedy
from support.waiting import until

SLOW = model_with(step_time_s=0.01)
PROMPTS = [[number, 7, *range(10, 10 + 5 * number)] for number in range(8)]


def requests(**more: object) -> list[Generation]:
    """Eight of all kinds: greedy and drawn, one and several samples, stop strings, ids, lengths."""
    made = []
    for number, prompt in enumerate(PROMPTS):
        kind: dict[str, object] = {"max_tokens": 30 + number}
        if number % 2:
            kind |= {"temperature": 0.9, "seed": 1000 + number, "num_logprobs": 1}
        if number in (3, 6):
            kind |= {"n": 3, "num_prompt_logprobs": 1}
        if number == 5:
            kind["stop_token_ids"] = frozenset(range(0, 256, 9))
            kind["min_tokens"] = 20
        if number in (2, 3):
            kind["constraint"] = Constraint(ConstraintKind.REGEX, "([a-e]{3} ){2,}")
            kind["eos_ids"] = frozenset({END})
        made.append(generation(f"r{number}", prompt, text=TextChoice(stop=("~~",)), **kind, **more))
    return made


async def undisturbed(wanted: Sequence[Generation]) -> dict[str, Collected]:
    async with running_engine(num_kv_blocks=200) as engine:
        return {one.request_id: await collect(await engine.generate(one)) for one in wanted}


class Reader:
    """Reads one stream as it comes."""

    def __init__(self, stream: GenerationStream) -> None:
        self.request_id = stream.generation.request_id
        self.num_tokens = 0
        self.kinds: list[str] = []
        self.got: Collected = Collected()
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: GenerationStream) -> None:
        async for event in stream:
            self.kinds.append(type(event).__name__)
            self.got.take(event)
            if isinstance(event, Chunk):
                self.num_tokens += len(event.token_ids)


async def read_all(running: RunningFleet, wanted: Sequence[Generation]) -> list[Reader]:
    return [Reader(await running.fleet.generate(one)) for one in wanted]


def assert_undisturbed(readers: Sequence[Reader], expected: dict[str, Collected]) -> None:
    for reader in readers:
        solo, got = expected[reader.request_id], reader.got
        assert got.token_ids == solo.token_ids, reader.request_id
        assert got.text == solo.text, reader.request_id
        assert got.finished == solo.finished, reader.request_id
        assert got.logprobs == solo.logprobs, reader.request_id
        assert got.prompt_logprobs == solo.prompt_logprobs, reader.request_id
        assert reader.kinds.count("Started") == reader.kinds.count("Done") == 1
        assert (reader.kinds[0], reader.kinds[-1]) == ("Started", "Done")
        assert got.done is not None
        assert solo.done is not None
        assert got.done.num_prompt_tokens == solo.done.num_prompt_tokens
        assert got.done.num_output_tokens == solo.done.num_output_tokens


async def test_running_requests_go_on_in_another_group_when_a_rank_of_theirs_is_killed() -> None:
    wanted = requests()
    expected = await undisturbed(wanted)
    async with running_fleet(SLOW, SLOW) as running, asyncio.timeout(60):
        readers = await read_all(running, wanted)
        await until(lambda: all(reader.num_tokens >= 4 for reader in readers), "tokens for everybody")
        on_both = [view.engine.num_running for view in running.fleet.status().groups if view.engine]
        assert min(on_both) >= 2  # routing spread them
        os.kill(running.pid(0), signal.SIGKILL)
        await until(lambda: running.view(0).state != "ready", "the verdict", timeout_s=1.0)
        assert running.fleet.ready  # the other group serves
        await asyncio.gather(*(reader.task for reader in readers))
        assert_undisturbed(readers, expected)
        assert running.groups[0].losses == [("rank 0 exited: killed by SIGKILL", 0.5)]
        assert not running.groups[1].losses
        # The lost group comes back, and serves.
        await running.formed_anew(0)
        assert running.view(0).state == "ready"
        again = [Reader(await running.fleet.generate(one)) for one in requests_named("again", wanted)]
        await asyncio.gather(*(reader.task for reader in again))
        assert all(view.engine and view.engine.step > 0 for view in running.fleet.status().groups)
        await running.settled()


def requests_named(prefix: str, like: Sequence[Generation]) -> list[Generation]:
    return [replace(one, request_id=RequestId(f"{prefix}-{one.request_id}")) for one in like]


async def test_requests_survive_one_loss_after_another() -> None:
    first, second = (model_with(fail_at(0, step, "raise"), step_time_s=0.005) for step in (12, 25))
    wanted = requests()
    expected = await undisturbed(wanted)
    async with running_fleet([first, SLOW], [second, SLOW], SLOW) as running, asyncio.timeout(60):
        readers = await read_all(running, wanted)
        await asyncio.gather(*(reader.task for reader in readers))
        assert_undisturbed(readers, expected)
        for kept, step in zip(running.groups, (12, 25), strict=False):
            ((reason, _),) = kept.losses
            assert reason.startswith(f"rank 0 failed in step {step}: InjectedFault: ")
        await asyncio.gather(running.formed_anew(0), running.formed_anew(1))
        await running.settled()


async def test_waiting_requests_move_silently_and_cancelling_reaches_them_there() -> None:
    async with running_fleet(SLOW, SLOW, max_num_seqs=1) as running, asyncio.timeout(60):
        readers = await read_all(running, [generation(f"r{n}", [n, 1, 2], max_tokens=20) for n in range(6)])
        await until(lambda: sum(bool(reader.kinds) for reader in readers) == 2, "one runs in each group")
        lost, kept = running.groups[0].engines[0], running.groups[1].engines[0]
        waiting = [r for r in readers if lost.knows(r.request_id) and not r.kinds]
        assert len(waiting) == 2
        os.kill(running.pid(0), signal.SIGKILL)
        await until(lambda: kept.knows(waiting[0].request_id), "it moved")
        waiting[0].task.cancel()
        await asyncio.gather(waiting[0].task, return_exceptions=True)
        assert running.fleet.abort(waiting[0].request_id)
        await asyncio.gather(*(reader.task for reader in readers if reader is not waiting[0]))
        assert all(reader.got.done for reader in readers if reader is not waiting[0])
        await running.formed_anew(0)
        await running.settled()


async def test_every_stream_ends_once_with_the_right_status_when_no_other_group_lives() -> None:
    async with running_fleet(model_with(step_time_s=0.02), max_num_seqs=2) as running, asyncio.timeout(60):
        wanted = [generation(f"r{n}", [n, 1, 2], max_tokens=500) for n in range(4)]
        readers = await read_all(running, wanted)
        await until(lambda: [bool(reader.num_tokens) for reader in readers] == [True, True, False, False], "two run")
        os.kill(running.pid(0), signal.SIGKILL)
        outcomes = await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [GroupLost] * 2 + [GroupLostBeforeStart] * 2
        assert all("rank 0 exited: killed by SIGKILL" in str(outcome) for outcome in outcomes)
        assert not running.fleet.ready
        assert "rank 0 exited: killed by SIGKILL" in running.fleet.not_ready_reason
        await running.formed_anew(0)
        # Their ids are free: what a lost group held may be sent again.
        again = [Reader(await running.fleet.generate(one)) for one in wanted]
        await until(lambda: again[0].num_tokens > 0, "tokens from the new group")
        for reader in again:
            assert running.fleet.abort(reader.request_id)
        await asyncio.gather(*(reader.task for reader in again))
        await running.settled()


async def test_running_requests_go_on_in_another_group_when_a_remote_worker_is_killed(tmp_path: Path) -> None:
    wanted = requests()
    expected = await undisturbed(wanted)
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    with remote_ranks(directory=directories[0]) as first, remote_ranks(directory=directories[1]) as second:
        places = (first.addresses, second.addresses)
        async with running_fleet(SLOW, SLOW, executor="remote", worker_addresses=places) as running:
            async with asyncio.timeout(60):
                readers = await read_all(running, wanted)
                await until(lambda: all(reader.num_tokens >= 4 for reader in readers), "tokens for everybody")
                first.kill(0)
                await asyncio.gather(*(reader.task for reader in readers))
                assert_undisturbed(readers, expected)
                assert "nothing listens" in running.groups[0].losses[0][0]
                first.start(0)  # as whoever runs it would
                await running.formed_anew(0)
                await running.settled()


async def test_silence_of_a_remote_rank_proves_nothing_and_its_requests_may_be_resumed(tmp_path: Path) -> None:
    times = {"heartbeat_timeout_s": 1.0, "lease_s": 1.0}
    with remote_ranks(directory=tmp_path) as remote:
        async with running_fleet(SLOW, executor="remote", worker_addresses=(remote.addresses,), **times) as running:
            async with asyncio.timeout(60):
                (reader,) = await read_all(running, [generation("r", [1], max_tokens=3000)])
                await until(lambda: reader.num_tokens, "tokens")
                pid = remote.processes[0].pid
                os.kill(pid, signal.SIGSTOP)
                # For all we know another control plane may have it: "lost, start over" would say too much.
                with pytest.raises(TakenOver, match="may hold"):
                    await reader.task
                assert not running.fleet.ready
                assert remote.processes[0].poll() is None  # and nothing was killed
                os.kill(pid, signal.SIGCONT)
                await running.formed_anew(0)
                assert running.fleet.abort(reader.request_id)  # it went on
                await running.settled()


async def test_requests_that_moved_are_computed_once_when_their_silent_group_comes_back(tmp_path: Path) -> None:
    times = {"heartbeat_timeout_s": 1.0, "lease_s": 1.0}
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    with remote_ranks(directory=directories[0]) as first, remote_ranks(directory=directories[1]) as second:
        places = (first.addresses, second.addresses)
        async with running_fleet(SLOW, SLOW, executor="remote", worker_addresses=places, **times) as running:
            async with asyncio.timeout(60):
                readers = await read_all(running, [generation(f"r{n}", [n], max_tokens=3000) for n in range(2)])
                await until(lambda: all(reader.num_tokens for reader in readers), "tokens")
                os.kill(first.processes[0].pid, signal.SIGSTOP)
                await until(lambda: running.groups[1].engines[0].knows(readers[0].request_id), "it moved")
                os.kill(first.processes[0].pid, signal.SIGCONT)
                await running.formed_anew(0)
                assert running.groups[0].engines[1] is not running.groups[0].engines[0]
                assert not running.groups[0].engines[1].knows(readers[0].request_id)
                for number, reader in enumerate(readers):
                    assert running.fleet.abort(reader.request_id)
                    await reader.task
                    assert reader.got.token_ids[0] == greedy([number], reader.num_tokens)
                await running.settled()


async def test_request_that_loses_every_group_it_runs_in_is_stopped_before_it_takes_them_all() -> None:
    async with running_fleet(SLOW, SLOW, SLOW, SLOW, executor="uni") as running, asyncio.timeout(60):
        # Four at once, one a group; the poison is the fifth and goes to the first. No door lets it through.
        readers = await read_all(running, [generation(f"r{n}", [n, 1, 2], max_tokens=100) for n in range(4)])
        await until(lambda: all(reader.num_tokens for reader in readers), "one runs in each group")
        (poison,) = await read_all(running, [generation("poison", [1], cache_namespace=b"too short")])
        with pytest.raises(GroupLost, match="DeltaRefused"):
            await poison.task
        await asyncio.gather(*(running.formed_anew(index) for index in range(3)))
        assert [len(kept.losses) for kept in running.groups] == [1, 1, 1, 0]
        await readers[3].task  # beside whom it never ran
        assert readers[3].got.done
        await asyncio.gather(*(reader.task for reader in readers[:3]), return_exceptions=True)
        await running.settled()


async def test_what_a_new_owner_continues_is_left_to_it_and_what_never_started_moves() -> None:
    async with running_fleet(SLOW, SLOW, executor="uni", max_num_seqs=1) as running, asyncio.timeout(60):
        readers = await read_all(running, [generation(f"r{n}", [n, 1, 2], max_tokens=25) for n in range(4)])
        await until(lambda: sum(reader.num_tokens > 0 for reader in readers) == 2, "one runs in each group")
        lost = running.groups[0].engines[0]
        started, waiting = (
            [r for r in readers if lost.knows(r.request_id) and bool(r.kinds) is s] for s in (True, False)
        )
        lost.fail(LossReason(None, "rank 0 has another owner: epoch 9", LossKind.FENCED))
        with pytest.raises(TakenOver):
            await started[0].task
        await waiting[0].task
        assert waiting[0].got.finished[0].reason is FinishReason.LENGTH
        with pytest.raises(DuplicateRequest):  # it lives on elsewhere
            await running.fleet.generate(generation(started[0].request_id, [1]))
        assert running.groups[0].keeping is not None
        assert (await running.groups[0].keeping).kind is LossKind.FENCED  # not ours to form anew
        await asyncio.gather(*(reader.task for reader in readers if reader is not started[0]))


async def test_a_drain_waits_for_requests_that_move_meanwhile() -> None:
    async with running_fleet(SLOW, SLOW) as running, asyncio.timeout(60):
        wanted = requests()
        expected = await undisturbed(wanted)
        readers = await read_all(running, wanted)
        await until(lambda: all(reader.num_tokens for reader in readers), "tokens for everybody")
        drain = asyncio.create_task(running.fleet.drain(30.0))
        await until(lambda: not running.fleet.ready, "draining")
        os.kill(running.pid(1), signal.SIGKILL)
        assert await drain == 0
        await asyncio.gather(*(reader.task for reader in readers))
        assert_undisturbed(readers, expected)
        await running.formed_anew(1)
        assert running.view(1).state == "draining"  # a group that comes back accepts nothing either
