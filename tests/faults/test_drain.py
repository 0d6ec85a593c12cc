"""How a server stops (cases B1): by signals, by AdminService.Drain, while it starts, on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import grpc
import pytest

from control_plane.announcement import Ready, StageProgress, Stopping
from maniple.v1 import admin_pb2, inference_pb2, inference_pb2_grpc
from support.faults import model_with
from support.scripted_reference import greedy
from support.serve_process import NOT_SERVING, SERVING, Caller, Stream, serving
from support.waiting import until

PROMPT = [5, 250, 17, 0]
MODEL = model_with(step_time_s=0.01)


async def four_streams(caller: Caller, max_tokens: int) -> list[Stream]:
    """Open four streams and wait until all of them bring tokens."""
    streams = [caller.generate(f"r{n}", [*PROMPT, n], max_tokens) for n in range(4)]
    await until(lambda: all(stream.token_ids for stream in streams), "tokens for all four")
    return streams


async def assert_refused(caller: Caller) -> None:
    refused = await caller.generate("late", PROMPT, 3).end()
    assert refused.error is not None
    assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in (refused.error.details() or "")


def assert_complete(streams: list[Stream], max_tokens: int) -> None:
    for number, stream in enumerate(streams):
        assert stream.error is None
        assert stream.token_ids == greedy([*PROMPT, number], max_tokens)
        assert [finish.reason for finish in stream.finishes] == [inference_pb2.FINISH_REASON_LENGTH]
        assert stream.is_done


def assert_aborted(streams: list[Stream]) -> None:
    for number, stream in enumerate(streams):
        assert stream.error is None
        assert stream.token_ids == greedy([*PROMPT, number], len(stream.token_ids))
        assert [finish.reason for finish in stream.finishes] == [inference_pb2.FINISH_REASON_ABORT]
        assert stream.is_done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_open_streams_complete_and_new_ones_are_refused_when_a_signal_stops_the_server(
    number: signal.Signals,
) -> None:
    with serving("--model", MODEL, "--executor", "mp", "--num-threads", "1") as server:
        async with Caller(server) as caller, asyncio.timeout(30):
            await caller.status()
            streams = await four_streams(caller, 120)
            assert await caller.health() == SERVING
            server.signal(number)
            await caller.healthy(NOT_SERVING, within_s=0.5)
            assert not any(stream.task.done() for stream in streams)  # at once, not when they are done
            (group,) = (await caller.status()).groups
            assert (group.state, group.num_running) == ("draining", 4)
            await assert_refused(caller)
            await asyncio.gather(*(stream.end() for stream in streams))
            assert_complete(streams, 120)
        assert server.exit_code() == 0
        name = "Ctrl-C" if number is signal.SIGINT else "SIGTERM"
        assert server.heard(Stopping) == [Stopping(name, 4, 30.0, name)]


async def test_streams_end_with_abort_when_the_drain_is_over_its_time() -> None:
    with serving("--model", MODEL, "--drain-timeout-s", "1") as server:
        async with Caller(server) as caller, asyncio.timeout(30):
            streams = await four_streams(caller, 3000)
            server.signal(signal.SIGTERM)
            signalled_at = time.monotonic()
            await asyncio.gather(*(stream.end() for stream in streams))
            assert 0.9 < time.monotonic() - signalled_at < 2.0
            assert_aborted(streams)
        assert server.exit_code() == 0


async def test_second_signal_hurries() -> None:
    with serving("--model", MODEL) as server:
        async with Caller(server) as caller, asyncio.timeout(30):
            streams = await four_streams(caller, 3000)
            server.signal(signal.SIGTERM)
            await caller.healthy(NOT_SERVING, within_s=0.5)
            server.signal(signal.SIGTERM)
            hurried_at = time.monotonic()
            await asyncio.gather(*(stream.end() for stream in streams))
            assert time.monotonic() - hurried_at < 0.5
            assert_aborted(streams)
        assert server.exit_code(within_s=3.0) == 0


async def test_drain_call_reports_progress_and_leaves_the_server_up_and_closed() -> None:
    with serving("--model", MODEL, "--max-num-seqs", "3") as server:
        async with Caller(server) as caller, asyncio.timeout(30):
            streams = [caller.generate(f"r{n}", [*PROMPT, n], 100) for n in range(4)]
            await until(lambda: sum(bool(stream.token_ids) for stream in streams) == 3, "three run, one waits")
            reports = [report async for report in caller.admin.Drain(admin_pb2.DrainRequest())]
            assert (reports[0].num_running, reports[0].num_waiting) == (3, 1)
            assert len(reports) > 2
            assert (reports[-1].num_running, reports[-1].num_waiting, reports[-1].num_aborted) == (0, 0, 0)
            await asyncio.gather(*(stream.end() for stream in streams))
            assert_complete(streams, 100)
            assert await caller.health() == NOT_SERVING
            await assert_refused(caller)
            assert (await caller.status()).groups[0].state == "draining"
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


async def test_drain_call_aborts_after_its_deadline_also_when_its_caller_has_gone() -> None:
    with serving("--model", MODEL) as server:
        async with Caller(server) as caller, asyncio.timeout(30):
            streams = await four_streams(caller, 3000)
            call = caller.admin.Drain(admin_pb2.DrainRequest(deadline_s=1.0))
            assert (await call.read()).num_running == 4
            call.cancel()
            await asyncio.gather(*(stream.end() for stream in streams))
            assert_aborted(streams)
            # Another one finds nothing to wait for; so does the signal.
            (report,) = [report async for report in caller.admin.Drain(admin_pb2.DrainRequest(deadline_s=5.0))]
            assert (report.num_running, report.num_aborted) == (0, 0)
        server.signal(signal.SIGTERM)
        assert server.exit_code(within_s=3.0) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_signal_while_it_starts_ends_it_at_once(number: signal.Signals, code: int) -> None:
    with serving("--model", model_with(load_time_s=60.0), "--executor", "mp") as server:
        deadline = time.monotonic() + 20
        while not any(isinstance(one, StageProgress) and one.stage == "load" for one in server.announced):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True)
        server.pids |= set(map(int, children.stdout.split()))
        assert len(server.pids) == 1
        server.signal(number)
        assert server.exit_code(within_s=5.0) == code
        assert not server.heard(Ready)


async def test_ctrl_c_on_a_terminal_says_what_happens_in_one_line() -> None:
    server, terminal = start_on_a_terminal("--model", MODEL)
    shown = b""

    async def shows(wanted: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + 20
        while wanted.encode() not in shown:
            assert time.monotonic() < deadline, shown
            try:
                shown += os.read(terminal, 65536)
            except BlockingIOError:
                await asyncio.sleep(0.01)

    try:
        await shows(" chat --server ")
        address = shown.decode().split("--server ")[1].split()[0]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            streams = [Stream(stub, f"r{n}", [*PROMPT, n], 3000, {}) for n in range(4)]
            await until(lambda: all(stream.token_ids for stream in streams), "tokens for all four")
            os.write(terminal, b"\x03")
            await shows("Stopping: Ctrl-C; 4 requests may still finish within 30 s; Ctrl-C again ends them now\r\n")
            os.write(terminal, b"\x03")
            await asyncio.gather(*(stream.end() for stream in streams))
            assert_aborted(streams)
        assert await asyncio.to_thread(server.wait, 5) == 0
        assert b"Traceback" not in shown
    finally:
        server.kill()
        server.wait()
        os.close(terminal)


def start_on_a_terminal(*words: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``serve`` as the foreground of a terminal; return it and the terminal's other end."""
    ours, theirs = pty.openpty()
    server = subprocess.Popen(
        [sys.executable, "-m", "control_plane.cli", "serve", "--listen", "127.0.0.1:0", "--log-level", "error", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "200", "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    return server, ours


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
