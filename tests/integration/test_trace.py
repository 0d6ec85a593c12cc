"""``serve --trace``: a file that viewers of Chrome's traces take, with every step of control plane and ranks."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from control_plane.engine import Engine
from control_plane.group.rank_clock import RankClock, StepTiming
from control_plane.step_trace import GroupTrace
from control_plane.trace_file import TraceFile
from maniple.v1 import worker_pb2
from maniple_client import Client
from service_chassis.ids import Rank
from support.engine_harness import collect, generation, running_engine
from support.serve_process import serving
from support.waiting import until

Events = list[dict[str, Any]]
CONTROL_PLANE = 1


def check_form(events: Events) -> None:
    """What the trace event format asks for: fields by phase, slices that nest on their track, pairs that pair."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    open_bars: dict[tuple[str, str, str], float] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["args"]["name"]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            key = event["cat"], event["id"], event["name"]
            if event["ph"] == "b":
                assert key not in open_bars
                open_bars[key] = event["ts"]
            else:
                assert open_bars.pop(key) <= event["ts"]
        else:
            assert event["ph"] in "sf"
    assert not open_bars
    for slices in tracks.values():
        stack: list[float] = []
        for began, ended in sorted(slices, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= began + 0.0005:  # half a nanosecond, of floats
                stack.pop()
            assert not stack or ended <= stack[-1] + 0.0005, "slices of one track overlap"
            stack.append(ended)


def steps_of(events: Events, name: str, pid: int) -> list[int]:
    """The steps that have a slice of this name in a process."""
    found = [event["args"] for event in events if event["ph"] == "X" and event["name"] == name and event["pid"] == pid]
    return sorted(step for args in found for step in args.get("steps", [args.get("step")]))


def check_steps(events: Events, num_steps: int, *, answered: list[int], ranks: int = 1) -> None:
    """Every step was scheduled and sent, those that compute answered and published, and every rank did them all."""
    every = list(range(1, num_steps + 1))
    for name in ("schedule", "send"):
        assert steps_of(events, name, CONTROL_PLANE) == every
    for name in ("result", "publish"):
        assert steps_of(events, name, CONTROL_PLANE) == answered
    in_flight = [event["args"]["step"] for event in events if event["ph"] == "b" and event["pid"] == CONTROL_PLANE]
    assert in_flight == answered
    by_name = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    for rank in range(ranks):
        pid = by_name[f"group 0, rank {rank}"]
        assert steps_of(events, "execute", pid) == every
        assert steps_of(events, "sample", pid) == answered
        queued = [event["args"]["step"] for event in events if event["ph"] == "b" and event["pid"] == pid]
        assert sorted(queued) == every


async def test_every_step_of_an_engine_is_in_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    file = TraceFile.at(str(path))
    async with running_engine(max_num_seqs=3, trace=GroupTrace(file, 0)) as engine:
        streams = [await engine.generate(generation(f"r{seed}", [seed, 2, 3], max_tokens=7)) for seed in range(5)]
        for stream in streams:
            await collect(stream)
        await settled(engine)
        num_steps = engine.status().step
        flushes = [step for step in range(1, num_steps + 1) if step in engine_flushes(path, file)]
    file.close()
    events = json.loads(path.read_text())
    check_form(events)
    answered = [step for step in range(1, num_steps + 1) if step not in flushes]
    assert len(answered) >= 14  # two rounds of three rows at most
    check_steps(events, num_steps, answered=answered)


async def settled(engine: Engine) -> None:
    await until(lambda: engine.status().ranks[0].completed == engine.status().step, "the last step is completed")


def engine_flushes(path: Path, file: TraceFile) -> list[int]:
    """The steps that compute nothing: sent with no token."""
    file.close()
    sends = [event["args"] for event in json.loads(path.read_text()) if event["name"] == "send"]
    return [step for args in sends if not args["tokens"] for step in args["steps"]]


def test_trace_of_a_server_with_two_ranks_is_whole_json_after_a_drain(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    words = ("--model", "scripted", "--tensor-parallel-size", "2", "--trace", str(path))
    with serving(*words) as server:
        with Client(server.address) as client:
            client.generate(token_ids=[1, 2, 3], max_tokens=9, ignore_eos=True).text()
        # What ranks did for the last steps is told behind their answers, and lost where the group ends at once.
        deadline = time.monotonic() + 30
        while sum(event["name"] == "execute" for event in lines_of(path.read_text())) < 2 * 9:
            assert time.monotonic() < deadline, "the ranks told too little"
            time.sleep(0.05)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
    events = json.loads(path.read_text())
    check_form(events)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "control plane",
        "group 0, rank 0",
        "group 0, rank 1",
    }
    answered = steps_of(events, "result", CONTROL_PLANE)
    assert len(answered) >= 9  # one a token
    by_name = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    sends = {event["args"]["steps"][0]: event["ts"] for event in events if event["name"] == "send"}
    for rank in range(2):
        pid = by_name[f"group 0, rank {rank}"]
        assert steps_of(events, "execute", pid)[: len(answered)] == answered
        for event in events:  # one clock: no rank begins what was not sent
            if event["name"] == "execute" and event["pid"] == pid:
                assert event["ts"] >= sends[event["args"]["step"]]


def test_trace_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "steps.json"
    command = [sys.executable, "-m", "control_plane.cli", "serve", "--model", "scripted", "--trace", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{path}: cannot be written to: No such file or directory" in " ".join(done.stderr.split())


def lines_of(text: str) -> Events:
    """What a viewer takes of an array that was cut off."""
    return [json.loads(line.removesuffix(",")) for line in text.splitlines()[:-1] if line.startswith("{")]


def test_trace_is_bounded_and_still_whole(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[str] = []

    class Kept(io.StringIO):
        def close(self) -> None:
            written.append(self.getvalue())
            super().close()

    file = TraceFile(Kept(), max_bytes=2000)
    for number in range(500):
        file.put({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": "x"}})
    file.close()
    events = json.loads(written[0])
    assert len(written[0]) <= 2200
    assert [event["pid"] for event in events] == list(range(len(events)))
    assert 10 < len(events) < 100


async def test_trace_that_was_never_closed_can_be_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    file = TraceFile.at(str(path))
    trace = GroupTrace(file, 3)
    trace.work("schedule", file.began_ns, file.began_ns + 5000, [7])
    trace.work("send", file.began_ns + 6000, file.began_ns + 7000, [7])  # whose line may be cut off
    await until(lambda: "send" in path.read_text(), "the events are written")
    *_, last = lines_of(path.read_text())
    assert (last["ts"], last["dur"], last["args"]) == (0.0, 5.0, {"steps": [7]})
    file.close()


@pytest.mark.parametrize(
    ("rank_ns", "ahead_ns"),
    [(1_500, 0), (1_001, 0), (0, 0), (9_001_500, 9_000_000), (500, -1_000)],
    ids=["same-clock", "early-in-the-round-trip", "an-older-rank", "ahead", "behind"],
)
def test_clock_of_a_rank_is_seen_by_a_round_trip(rank_ns: int, ahead_ns: int) -> None:
    clock = RankClock.seen(rank_ns, asked_ns=1_000, answered_ns=2_000)
    timing = worker_pb2.StepsResponse.StepTiming(
        step=5, accepted_ns=10_000_000, started_ns=10_000_010, completed_ns=10_000_099
    )
    shifted = 10_000_000 - ahead_ns
    assert clock.here(timing) == StepTiming(5, shifted, shifted + 10, 0, shifted + 99)


def test_rank_without_sampling_shows_its_step_as_executed(tmp_path: Path) -> None:
    file = TraceFile.at(str(tmp_path / "steps.json"))
    GroupTrace(file, 0).rank_timed(Rank(1), StepTiming(4, *(file.began_ns + ns for ns in (0, 1000)), 0, 0))
    file.close()
    names = [event["name"] for event in json.loads((tmp_path / "steps.json").read_text()) if event["ph"] == "X"]
    assert names == ["step 4", "execute"]
