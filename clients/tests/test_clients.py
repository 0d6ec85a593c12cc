"""Every client program against live servers: scripted model, real faults, outputs known beforehand.

Run by ``make clients``, not by ``make test``: it gets compilers from package registries. A language whose toolchain
cannot be had is skipped with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from control_plane.announcement import Ready, StageProgress
from maniple.v1 import admin_pb2, admin_pb2_grpc
from maniple_client import Client
from support.certificates import Authority, Identity
from support.client_programs import NAMES, Program, Run, build_all
from support.remote_ranks import free_ports, remote_ranks
from support.rst_proxy import resetting_proxy
from support.scripted_reference import greedy
from support.serve_process import ServeProcess, serving

STEP_S = 0.01
MODEL = "scripted:" + json.dumps({"step_time_s": STEP_S, "sampler": "numpy"})
PROMPT = [5, 250, 17, 0, 5]
LONG = 3000  # tokens: half a minute


@pytest.fixture(scope="session")
def built() -> dict[str, Program | Exception]:
    wanted = os.environ.get("MANIPLE_CLIENTS")
    return build_all(wanted.split(",") if wanted else NAMES)


@pytest.fixture(scope="session")
def programs(built: dict[str, Program | Exception]) -> list[Program]:
    return [one for one in built.values() if isinstance(one, Program)]


@pytest.fixture(params=NAMES)
def program(request: pytest.FixtureRequest, built: dict[str, Program | Exception]) -> Program:
    one = built.get(request.param, ValueError("not wanted"))
    if isinstance(one, Program):
        return one
    if type(one).__name__ == "BuildFailed":
        pytest.fail(str(one))
    pytest.skip(f"{request.param}: {one}")


@pytest.fixture(scope="session")
def server(built: dict[str, Program | Exception]) -> Iterator[ServeProcess]:
    with serving("--model", MODEL, "--executor", "uni", "--max-num-seqs", "16") as one:
        yield one


def asked(target: str, number: int, num_tokens: int, *more: str) -> list[str]:
    """The words for a greedy generation whose output is known."""
    prompt = ",".join(map(str, [*PROMPT, number]))
    sampling = ["--temperature", "0", "--ignore-eos", "--max-tokens", str(num_tokens)]
    return ["generate", "--target", target, "--token-ids", prompt, *sampling, "--json", *more]


def assert_whole(run: Run, number: int, num_tokens: int) -> None:
    """Its output is that of an undisturbed run, each token once."""
    assert run.wait() == 0, run
    assert run.token_ids() == greedy([*PROMPT, number], num_tokens), run
    kinds = [event["event"] for event in run.events]
    assert kinds[-2:] == ["finished", "done"], run
    assert run.of("finished") == [
        {"event": "finished", "index": 0, "reason": "length", "num_output_tokens": num_tokens}
    ], run


def status(target: str) -> admin_pb2.GetStatusResponse:
    with grpc.insecure_channel(target) as channel:
        answer: admin_pb2.GetStatusResponse = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
            admin_pb2.GetStatusRequest(), timeout=10
        )
        return answer


def counted(target: str, *, num_running: int = 0, num_waiting: int = 0) -> None:
    """Wait until so much runs and waits; nothing, unless said otherwise."""
    deadline = time.monotonic() + 30.0
    while True:
        groups = status(target).groups
        counts = (sum(one.num_running for one in groups), sum(one.num_waiting for one in groups))
        if counts == (num_running, num_waiting):
            return
        assert time.monotonic() < deadline, f"{counts} run and wait"
        time.sleep(0.01)


# One server, one program.


def test_program_streams_the_known_tokens(program: Program, server: ServeProcess) -> None:
    run = program.run(*asked(server.address, 1, 40))
    assert_whole(run, 1, 40)
    assert next(event["event"] for event in run.events) == "started"
    assert run.of("started")[0]["num_prompt_tokens"] == len(PROMPT) + 1
    assert set(run.of("done")[0]) == {"event", "num_output_tokens", "duration_s"}
    expected = bytes(one for one in greedy([*PROMPT, 1], 40) if one < 256).decode("utf-8", "replace")
    assert run.text() == expected


def test_program_prints_text_as_it_is(program: Program, server: ServeProcess) -> None:
    prompt = "naïve ✓"
    flags = ["--temperature", "0", "--ignore-eos", "--max-tokens", "21"]
    run = program.run("generate", "--target", server.address, "--prompt", prompt, *flags)
    assert run.wait() == 0, run
    ids = greedy(list(prompt.encode()), 21)
    assert "".join(run.lines) == bytes(one for one in ids if one < 256).decode("utf-8", "replace") + "\n", run


def test_program_cancels_and_the_server_frees_at_once(program: Program, server: ServeProcess) -> None:
    run = program.run(*asked(server.address, 2, LONG, "--cancel-after", "5"))
    assert run.wait() == 0
    assert run.events[-1] == {"event": "cancelled"}, run
    ids = run.token_ids()
    assert 5 <= len(ids) < LONG
    assert ids == greedy([*PROMPT, 2], len(ids))
    counted(server.address)


def test_program_that_may_detach_cancels_by_abort(program: Program, server: ServeProcess) -> None:
    run = program.run(*asked(server.address, 3, LONG, "--cancel-after", "5", "--detach-grace", "30"))
    assert run.wait() == 0
    assert run.events[-1] == {"event": "cancelled"}, run
    counted(server.address)


def test_program_interrupted_leaves_nothing_running(program: Program, server: ServeProcess) -> None:
    run = program.start(*asked(server.address, 4, LONG))
    run.until(lambda one: one.token_ids(), "a token")
    run.signal(signal.SIGINT)
    run.wait(10)
    counted(server.address)


def test_program_tells_what_was_refused_and_does_not_try_again(program: Program, server: ServeProcess) -> None:
    run = program.run(*asked(server.address, 6, 0))
    assert run.wait() == 1
    (event,) = run.events
    assert (event["event"], event["status"], event["reason"]) == ("error", "INVALID_ARGUMENT", "INVALID_PARAMETER")
    assert [one["field"] for one in event["violations"]] == ["max_tokens"], run
    assert event["violations"][0]["description"] in event["message"]


def test_program_aborts_another_ones_request(program: Program, server: ServeProcess) -> None:
    name = f"long-{program.name}"
    run = program.start(*asked(server.address, 7, LONG, "--request-id", name))
    run.until(lambda one: one.token_ids(), "a token")
    assert run.of("started")[0]["request_id"] == name
    for was_running in (True, False):
        abort = program.run("abort", name, "--target", server.address, "--json")
        assert abort.events == [{"event": "aborted", "was_running": was_running}], abort
    assert run.wait() == 0, run
    assert [event["reason"] for event in run.of("finished")] == ["abort"]


def test_program_shows_model_tokens_and_status(program: Program, server: ServeProcess) -> None:
    def ask(*words: str) -> dict[str, Any]:
        run = program.run(*words, "--target", server.address, "--json")
        assert run.wait() == 0, run
        (event,) = run.events
        return event

    assert ask("model") == {"event": "model", "names": ["scripted"], "max_model_len": 4096, "vocab_size": 260}
    assert ask("tokenize", "é!") == {"event": "tokens", "token_ids": [0xC3, 0xA9, 0x21]}
    told = ask("status")
    assert told == {"event": "status", "ready": True, "why_not": "", "num_running": 0, "num_waiting": 0}


def test_program_refuses_what_it_does_not_know(program: Program) -> None:
    for words in (
        [],
        ["dance"],
        ["generate", "--dance"],
        ["generate", "--max-tokens", "many"],
        ["status", "--token-file", "x"],
    ):
        run = program.run(*words)
        assert run.wait() == 2, (words, run)
        assert not run.lines


def test_program_speaks_tls_and_says_who_it_is(program: Program, guarded: tuple[str, Path, Path]) -> None:
    target, ca, tokens = guarded
    run = program.run(*asked(target, 8, 5, "--tls-ca", str(ca), "--token-file", str(tokens / "good")))
    if "JDK provider does not support ALPN" in run.aside:
        pytest.skip("java: Debian builds netty without ALPN, and HTTP/2 over TLS needs it")
    assert_whole(run, 8, 5)
    run = program.run(*asked(target, 8, 5, "--tls-ca", str(ca), "--token-file", str(tokens / "bad")))
    assert run.wait() == 1
    assert [(one["event"], one["status"], one["reason"]) for one in run.events] == [
        ("error", "UNAUTHENTICATED", "UNAUTHENTICATED")
    ], run


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """A server with TLS that knows one caller; who signed its certificate, and files of tokens."""
    place = tmp_path_factory.mktemp("guarded")
    authority = Authority(place / "authority")
    identity = Identity(place / "server", authority, "127.0.0.1")
    (place / "good").write_text("a-token-that-is-known\n")
    (place / "bad").write_text("a-token-that-is-not-known\n")
    callers = place / "callers.toml"
    callers.write_text(
        '[[caller]]\nidentity = "somebody"\nscopes = ["inference", "status"]\ntoken = "a-token-that-is-known"\n'
    )
    files = identity.files
    words = ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--auth-callers", str(callers)]
    with serving("--model", MODEL, "--executor", "uni", *words) as server:
        yield server.address, authority.path, place


# All programs at once, since a fault costs seconds whoever watches it. Each test then reads what its program did.


@pytest.fixture(scope="session")
def late(programs: list[Program], server: ServeProcess) -> dict[str, Run]:
    """Their deadline is much too short for what they ask for, and long enough for a Java machine to start."""
    runs = _started(programs, server.address, LONG, "--deadline", "4")
    for run in runs.values():
        run.wait()
    return runs


def test_program_ends_with_its_deadline(program: Program, late: dict[str, Run], server: ServeProcess) -> None:
    run = late[program.name]
    assert run.wait() == 1
    assert run.events[-1]["event"] == "error", run
    assert run.events[-1]["status"] == "DEADLINE_EXCEEDED", run
    ids = run.token_ids()
    assert ids, run
    assert ids == greedy([*PROMPT, _number(program)], len(ids))
    counted(server.address)


@pytest.fixture(scope="session")
def full_queue(programs: list[Program]) -> dict[str, Run]:
    """The queue is full when they come, and is not when they come again."""
    limits = ["--max-num-seqs", "1", "--max-num-waiting", "1"]
    with serving("--model", MODEL, "--executor", "uni", *limits) as server:
        with Client(server.address) as client:
            running = client.generate(token_ids=PROMPT, max_tokens=LONG, ignore_eos=True)
            next(running)
            waiting = client.generate(token_ids=PROMPT, max_tokens=LONG, ignore_eos=True)
            counted(server.address, num_running=1, num_waiting=1)
            runs = _started(programs, server.address, 8)
            for run in runs.values():
                run.until(lambda one: one.of("sending_again"), "a refusal")
            running.close()
            waiting.close()
        for run in runs.values():
            run.wait()
        return runs


def test_program_comes_again_when_the_queue_was_full(program: Program, full_queue: dict[str, Run]) -> None:
    run = full_queue[program.name]
    assert_whole(run, _number(program), 8)
    refusals = run.of("sending_again")
    assert {(one["status"], one["reason"]) for one in refusals} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}, run
    # RetryInfo says one second, and a first try of its own accord would come after a twentieth of that.
    assert all(one["delay_s"] >= 1.0 for one in refusals), run


@pytest.fixture(scope="session")
def lost_group(programs: list[Program]) -> dict[str, Run]:
    """The only rank is killed while they stream; the group is formed anew."""
    with serving("--model", MODEL, "--executor", "mp", "--num-threads", "1") as server:
        runs = _begun_together(programs, server.address, server.address, 150)
        (rank,) = status(server.address).groups[0].ranks
        os.kill(rank.pid, signal.SIGKILL)
        for run in runs.values():
            run.wait()
        server.hear(Ready, 2)
        return runs


def test_program_starts_over_when_the_group_was_lost(program: Program, lost_group: dict[str, Run]) -> None:
    run = lost_group[program.name]
    assert_whole(run, _number(program), 150)
    (again,) = run.of("starting_over")
    assert (again["status"], again["reason"]) == ("ABORTED", "GROUP_LOST"), run
    assert "rank 0" in again["message"]
    first, second = run.of("started")
    assert first["request_id"] != second["request_id"]
    # Until the group is back it is told to come again.
    assert {(one["status"], one["reason"]) for one in run.of("sending_again")} <= {("UNAVAILABLE", "NOT_READY")}, run


@pytest.fixture(scope="session")
def killed_owner(programs: list[Program], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The control plane that owns the group is killed while they stream; another one takes the group over."""
    directory = tmp_path_factory.mktemp("takeover")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with remote_ranks(1, directory=directory) as ranks:
        words = ["--worker-addresses", ",".join(ranks.addresses), "--model", MODEL, "--lease-s", "1"]
        words += ["--report-interval-s", "0.05", "--idle-report-interval-s", "0.1"]
        planes: list[ServeProcess] = []
        try:
            for address in addresses:
                planes.append(ServeProcess([*words, "--listen", address], verb="control-plane"))
                # The first one owns the group, the second one waits for it.
                planes[-1].hear(StageProgress if planes[1:] else Ready)
            runs = _begun_together(programs, ",".join(addresses), addresses[0], 300)
            planes[0].signal(signal.SIGKILL)
            for run in runs.values():
                run.wait()
            return runs
        finally:
            for plane in planes:
                plane.close()


def test_program_resumes_when_the_control_plane_was_killed(program: Program, killed_owner: dict[str, Run]) -> None:
    run = killed_owner[program.name]
    assert_whole(run, _number(program), 300)
    assert len(run.of("started")) == 1, run
    assert not run.of("starting_over"), run
    if not program.name.startswith("python"):  # whose client resumes without a word
        assert run.of("resuming")[0]["reason"] == "", run
        assert run.of("resuming")[-1]["target"], run


@pytest.fixture(scope="session")
def reset_streams(programs: list[Program], server: ServeProcess) -> dict[str, Run]:
    """A proxy resets each stream once, after some tokens."""
    with resetting_proxy(server.address, after=7) as address:
        runs = _started(programs, address, 60, "--detach-grace", "30")
        for run in runs.values():
            run.wait()
        return runs


def test_program_takes_a_reset_by_a_proxy_for_a_lost_connection(
    program: Program, reset_streams: dict[str, Run]
) -> None:
    run = reset_streams[program.name]
    assert_whole(run, _number(program), 60)
    if not program.name.startswith("python"):
        (resumed,) = run.of("resuming")
        assert (resumed["status"], resumed["reason"]) == ("INTERNAL", ""), run
        assert "RST_STREAM" in resumed["message"]


def _number(program: Program) -> int:
    return 50 + NAMES.index(program.name)


def _begun_together(programs: Sequence[Program], target: str, owner: str, num_tokens: int) -> dict[str, Run]:
    """Have all requests begin at once, since a busy machine starts programs seconds apart; return at twenty tokens."""
    with Client(owner) as client:
        client.admin.pause("keep")
        runs = _started(programs, target, num_tokens)
        counted(owner, num_waiting=len(programs))
        client.admin.resume()
    for run in runs.values():
        run.until(lambda one: len(one.token_ids()) >= 20, "twenty tokens")
    return runs


def _started(programs: Sequence[Program], target: str, num_tokens: int, *more: str) -> dict[str, Run]:
    return {one.name: one.start(*asked(target, _number(one), num_tokens, *more)) for one in programs}
