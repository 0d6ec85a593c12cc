"""The ``maniple`` command as people run it: processes, exit codes, what is printed where."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from control_plane.announcement import Ready
from control_plane.cli.announcements import from_json
from control_plane.cli.demo import QUESTION
from control_plane.cli.main import main
from maniple.v1 import admin_pb2
from maniple.v1 import admin_pb2 as pb
from support.fake_server import FakeServer, running


def maniple(*words: str, stdin: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MANIPLE_")}
    return subprocess.run(
        [sys.executable, "-m", "control_plane.cli", *words],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | environ,
    )


def started(*words: str) -> subprocess.Popen[str]:
    """Start the command; the caller ends it."""
    command = [sys.executable, "-m", "control_plane.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


def test_help_names_every_command_and_exits_0() -> None:
    done = maniple("--help")
    assert done.returncode == 0
    for word in ("serve", "control-plane", "worker", "generate", "chat", "status", "model fetch", "model list"):
        assert f"  {word} " in done.stdout
    assert "demo  " not in done.stdout.partition("Examples")[0], "the hidden command is hidden"


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["chat", "--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "control_plane.cli", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "command",
    ["serve", "control-plane", "worker", "generate", "chat", "status", "replay", "model fetch", "model list", "demo"]
    + [f"admin {verb}" for verb in ("pause", "resume", "sleep", "wake-up", "reset-prefix-cache", "drain")],
)
def test_every_command_explains_itself(command: str) -> None:
    done = maniple(*command.split(), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: maniple {command} ")
    assert len(done.stdout) > 200
    assert "Examples:" in done.stdout or command in ("chat", "demo")


@pytest.mark.parametrize("words", [(), ("sing",), ("serve", "--no-such-flag"), ("generate",), ("chat", "--n", "2")])
def test_bad_usage_exits_2(words: tuple[str, ...]) -> None:
    assert maniple(*words).returncode == 2


def test_serve_reports_every_fault_at_once_and_starts_nothing() -> None:
    done = maniple("serve", "--block-size", "x", "--max-num-seqs", "-1", "--model", "/nowhere", MANIPLE_LISTEN="here")
    assert done.returncode == 2
    assert done.stdout == ""
    for fault in (
        "--block-size x: must be",
        "--max-num-seqs -1: must be",
        "--model /nowhere: does",
        "--listen here: m",
    ):
        assert fault in done.stderr


def test_control_plane_starts_no_worker_itself_and_checks_its_flags() -> None:
    done = maniple("control-plane", "--model", "scripted")
    assert (done.returncode, "needs to know where the workers are" in done.stderr) == (2, True)
    done = maniple("control-plane", "--worker-addresses", "a:1", "--listen", "0.0.0.0:0", "--model", "scripted")
    assert (done.returncode, "--listen 0.0.0.0:0: needs --advertise-address" in done.stderr) == (2, True)
    done = maniple("serve", "--handover", "--model", "scripted")
    assert (done.returncode, "--handover on: needs workers that outlive" in done.stderr) == (2, True)
    done = maniple("control-plane", "--dtype", "int3", "--worker-addresses", "here")
    assert done.returncode == 2
    assert "--dtype int3" in done.stderr
    assert "must be HOST:PORT, unix:PATH or dns:///NAME:PORT, not here" in done.stderr


def test_generate_prints_the_answer_and_nothing_else(server: FakeServer) -> None:
    done = maniple("generate", "Why?", "--server", server.address, "--temperature", "0", "--stop", "X", "--stop", "Y")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The sky is blue.\n", "")
    request = server.requests[0]
    assert (request.text, list(request.sampling.stop), request.sampling.temperature) == ("Why?", ["X", "Y"], 0.0)
    assert not request.sampling.HasField("max_tokens")


def test_generate_finds_the_server_by_the_environment_and_reads_standard_input(server: FakeServer) -> None:
    done = maniple("generate", "-", "--chat", "--stats", stdin="Why?\n", MANIPLE_SERVER=server.address)
    assert (done.returncode, done.stdout) == (0, "The sky is blue.\n")
    assert server.requests[0].chat.messages[0].content == "Why?\n"
    # 4 tokens, first after 125 ms, 3 more in 375 ms: from the fake server's own numbers.
    assert "first token after 125 ms, then 8.0 tokens/s" in done.stderr


def test_generate_json_prints_one_event_a_line(server: FakeServer) -> None:
    done = maniple("generate", "--token-ids", "1,2", "--json", "--server", server.address)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["started", *["chunk"] * 4, "finished", "done"]
    assert list(server.requests[0].token_ids.ids) == [1, 2]


def test_generate_without_a_server_says_how_to_start_one() -> None:
    done = maniple("generate", "x", "--server", "127.0.0.1:1")
    assert done.returncode == 1
    assert "maniple serve` starts one" in done.stderr


def test_ctrl_c_ends_generate_with_130_and_frees_the_server(server: FakeServer) -> None:
    server.generate = server.wait_for_cancel
    process = started("generate", "x", "--server", server.address)
    try:
        assert process.stdout is not None
        assert process.stdout.read(len("Once upon")) == "Once upon"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()
    assert server.cancelled.wait(5)


def test_chat_without_a_terminal_keeps_the_conversation_until_reset(server: FakeServer) -> None:
    lines = "/system Be brief.\nWhy?\nAnd then?\n/reset\nWho?\n/quit\nnever sent\n"
    done = maniple("chat", "--server", server.address, stdin=lines)
    assert done.returncode == 0
    assert done.stdout.count("The sky is blue.\n") == 3
    said = [[(one.role, one.content) for one in request.chat.messages] for request in server.requests]
    assert said == [
        [("system", "Be brief."), ("user", "Why?")],
        [("system", "Be brief."), ("user", "Why?"), ("assistant", "The sky is blue."), ("user", "And then?")],
        [("system", "Be brief."), ("user", "Who?")],
    ]


# A session leader without a terminal gets the first one it opens; then Ctrl-C signals the program, as in a shell.
_TAKE_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.executable, sys.argv[1:])"


@contextmanager
def on_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the command on a pseudo-terminal; yield it and the other end."""
    terminal, inner = os.openpty()
    command = [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, "-m", "control_plane.cli", *words]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_ctrl_c_in_chat_ends_the_answer_and_not_the_program(server: FakeServer) -> None:
    server.generate = server.wait_for_cancel
    with on_a_terminal("chat", "--server", server.address) as (process, terminal):
        assert "Talking to fake" in _read_until(terminal, "> ")
        os.write(terminal, b"Tell me\n")
        _read_until(terminal, "Once upon")
        os.write(terminal, b"\x03")
        assert "[stopped]" in _read_until(terminal, "> ")
        assert server.cancelled.wait(5)
        # Pressed until it is seen: an interpreter that shows its prompt may not listen for a moment.
        _read_until(terminal, "/quit or Ctrl-D leaves", press=b"\x03")
        os.write(terminal, b"/quit\n")
        assert process.wait(10) == 0


def test_bytes_that_are_no_text_end_neither_chat_nor_its_conversation(server: FakeServer) -> None:
    with on_a_terminal("chat", "--server", server.address) as (process, terminal):
        _read_until(terminal, "> ")
        os.write(terminal, b"Why \xff\xfe?\n")
        _read_until(terminal, "The sky is blue.")
        os.write(terminal, b"And then?\n/quit\n")
        assert process.wait(10) == 0
    asked = [request.chat.messages[-1].content for request in server.requests]
    assert asked == ["Why \ufffd\ufffd?", "And then?"]


def _read_until(terminal: int, wanted: str, *, press: bytes = b"", timeout_s: float = 20.0) -> str:
    seen, end = "", time.monotonic() + timeout_s
    while wanted not in seen:
        assert time.monotonic() < end, f"never saw {wanted!r} in {seen!r}"
        os.write(terminal, press)
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


def _status() -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(
        model="fake",
        version="1.2.3",
        uptime_s=3700,
        ready=True,
        output_tokens_per_s=12.0,
        prefix_cache_queries=200,
        prefix_cache_hits=50,
        groups=[
            {  # type: ignore[list-item]
                "name": "g0",
                "state": "ready",
                "epoch": 2,
                "step": 77,
                "num_running": 3,
                "num_waiting": 1,
                "num_free_blocks": 10,
                "num_total_blocks": 40,
                "block_size": 16,
                "ranks": [{"rank": 0, "pid": 4711, "accepted": 77, "completed": 76}],
            }
        ],
    )


def test_status_says_everything_of_the_group(server: FakeServer) -> None:
    server.status = _status()
    done = maniple("status", "--server", server.address)
    assert done.returncode == 0
    for fact in (
        "fake",
        "1.2.3",
        "1 h 1 min",
        "ready, epoch 2, step 77",
        "3 running, 1 waiting",
        "10 free, 0 cached, of 40",
        "12 output tokens/s",
        "found 50 of 200 tokens (25 %)",
        "pid 4711, accepted 77, completed 76",
    ):
        assert fact in done.stdout


def test_status_json_holds_zeros_too(server: FakeServer) -> None:
    server.status = _status()
    shown = json.loads(maniple("status", "--json", "--server", server.address).stdout)
    assert shown["groups"][0]["num_cached_blocks"] == 0
    assert shown["groups"][0]["step"] == 77  # protobuf's own JSON has a string here, as of every 64-bit number
    assert type(shown["groups"][0]["ranks"][0]["accepted"]) is type(shown["num_finished"]) is int


def test_status_exits_1_while_the_server_is_not_ready(server: FakeServer) -> None:
    server.status = admin_pb2.GetStatusResponse(ready=False, not_ready_reason="loading")
    done = maniple("status", "--server", server.address)
    assert done.returncode == 1
    assert "not ready: loading" in done.stdout


def test_status_watch_goes_on_until_ctrl_c(server: FakeServer) -> None:
    server.status = _status()
    process = started("status", "--watch", "--json", "--interval-s", "0.05", "--server", server.address)
    try:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["model"] for _ in range(3)] == ["fake"] * 3
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()


def test_help_appears_within_a_blink() -> None:
    """The bound is 0.3 s; the best of five, since the machine may be busy."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        maniple("--help")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.3


def test_command_is_installed_beside_the_interpreter() -> None:
    assert (Path(sys.executable).parent / "maniple").exists()


def test_model_list_shows_what_is_in_the_cache(tmp_path: Path) -> None:
    done = maniple("model", "list", MANIPLE_CACHE=str(tmp_path))
    assert (done.returncode, "cache is empty" in done.stdout) == (0, True)
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}" + " " * (1024 * 1024 - 2))
    done = maniple("model", "list", MANIPLE_CACHE=str(tmp_path))
    assert done.stdout.split() == ["tiny", "1.0", "MiB", str(model)]


def test_model_fetch_of_what_cannot_be_a_model_exits_2(tmp_path: Path) -> None:
    done = maniple("model", "fetch", "/nowhere.gguf", MANIPLE_CACHE=str(tmp_path))
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_model_fetch_says_why_the_hub_gave_nothing(tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path), "MANIPLE_CACHE": str(tmp_path)}
    done = maniple("model", "fetch", "owner/name", **environ)
    assert done.returncode == 1
    assert "owner/name: is no directory or file here, and cannot be fetched from the hub" in done.stderr


# From here on against a real server: control plane, scripted worker, the command people type.


@contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Ready]]:
    """Run ``maniple serve`` until the block ends; whatever happens the process is gone then."""
    process = started("serve", "--model", model, "--announce", "json", "--log-level", "warning", *flags)
    try:
        assert process.stdout is not None
        ready = next((one for one in map(from_json, process.stdout) if isinstance(one, Ready)), None)
        assert ready is not None, f"the server ended with exit code {process.wait()} before it was ready"
        yield process, ready
    finally:
        process.kill()
        process.communicate()


def forced(text: str) -> str:
    """Return a scripted model that answers every request with ``text``."""
    return f"scripted:{json.dumps({'forced': [*text.encode(), 256]})}"


@pytest.fixture(scope="module")
def real_address() -> Iterator[str]:
    with serving(forced("Hello, world"), "--listen", "127.0.0.1:0", "--served-model-name", "one", "two") as (_, ready):
        yield ready.address


def test_ready_announces_what_is_served(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    with serving("scripted", "--listen", address, "--num-kv-blocks", "9", "--block-size", "4") as (_, ready):
        assert (ready.address, ready.model, ready.num_blocks, ready.block_size) == (address, "scripted", 8, 4)
        assert maniple("generate", "Hi", "--max-tokens", "3", "--server", address).returncode == 0


def test_generate_and_chat_answer_from_a_real_server(real_address: str) -> None:
    done = maniple("generate", "Hi", "--stats", "--temperature", "0", "--server", real_address)
    assert (done.returncode, done.stdout) == (0, "Hello, world\n")
    # Two bytes of prompt; twelve of answer and the end of text.
    assert "[2 prompt tokens (0 cached), 13 output tokens" in done.stderr
    done = maniple("chat", "--server", real_address, stdin="Hi\nAnd then?\n")
    assert (done.returncode, done.stdout) == (0, "Hello, world\nHello, world\n")


def test_stop_string_cuts_the_answer_of_a_real_server(real_address: str) -> None:
    done = maniple("generate", "Hi", "--stop", ", w", "--server", real_address)
    assert done.stdout == "Hello\n"


def test_status_of_a_real_server_counts_what_was_served(real_address: str) -> None:
    maniple("generate", "Hi", "--server", real_address)
    shown = json.loads(maniple("status", "--json", "--server", real_address).stdout)
    assert (shown["model"], shown["ready"]) == ("one", True)
    assert shown["num_finished"] >= 1
    group = shown["groups"][0]
    assert (group["state"], group["num_running"], group["num_waiting"]) == ("ready", 0, 0)
    assert group["num_free_blocks"] + group["num_cached_blocks"] >= group["num_total_blocks"]


def test_errors_of_a_real_server_are_sentences(real_address: str) -> None:
    done = maniple("generate", "Hi", "--model", "three", "--server", real_address)
    assert done.returncode == 1
    assert "three" in done.stderr
    done = maniple("generate", "Hi", "--stop", "", "--server", real_address)
    assert done.returncode == 1
    assert "stop" in done.stderr


def test_port_that_is_taken_is_reported_before_anything_starts(real_address: str) -> None:
    done = maniple("serve", "--model", "scripted", "--listen", real_address)
    assert done.returncode == 2
    assert "--listen" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_an_idle_server_with_exit_code_0(number: signal.Signals) -> None:
    with serving("scripted", "--listen", "127.0.0.1:0") as (process, _):
        process.send_signal(number)
        assert process.wait(10) == 0


def test_demo_serves_asks_answers_stops_and_exits_0() -> None:
    done = maniple("demo", "--model", forced("Paris, for its tower."))
    assert done.returncode == 0, done.stderr
    assert f"> {QUESTION}" in done.stdout
    assert "Paris, for its tower.\n\n[" in done.stdout
    assert "first token after" in done.stdout
    assert done.stdout.endswith("`make serve` starts one that stays.\n")


def test_demo_passes_on_why_the_server_did_not_start() -> None:
    done = maniple("demo", "--model", "/nowhere")
    assert done.returncode == 2
    assert "--model /nowhere: does not exist" in done.stderr


@pytest.mark.parametrize(
    ("words", "asked", "printed"),
    [
        (["pause"], pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_ABORT), "Paused. 4 samples are kept.\n"),
        (
            ["pause", "--mode", "wait", "--clear-cache"],
            pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT, clear_cache=True),
            "Paused. 4 samples are kept.\n",
        ),
        (["resume"], pb.ResumeGenerationRequest(), "Generation goes on.\n"),
        (
            ["sleep", "--mode", "keep"],
            pb.SleepRequest(mode=pb.PAUSE_MODE_KEEP),
            "Asleep: scheduling. 4 samples are kept.\n",
        ),
        (
            ["wake-up", "weights", "kv_cache"],
            pb.WakeUpRequest(tags=["weights", "kv_cache"]),
            "Still asleep: scheduling.\n",
        ),
        (
            ["reset-prefix-cache"],
            pb.ResetPrefixCacheRequest(),
            "5 cached blocks were forgotten; 2 are held by requests",
        ),
        (
            ["drain", "--deadline-s", "2"],
            pb.DrainRequest(deadline_s=2),
            "3 running, 1 waiting\nDrained, 4 requests were",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_admin_asks_what_was_said_and_says_what_came_of_it(
    words: list[str], asked: object, printed: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = pb.GetStatusResponse(groups=[pb.GroupStatus(num_running=3, num_waiting=1)])
    assert main(["admin", *words, "--server", server.address]) == 0
    assert asked in server.requests
    assert capsys.readouterr().out.startswith(printed)


def test_admin_reports_a_refusal_and_bad_words(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", "sleep", "--level", "1", "--server", server.address]) == 1
    assert "not built" in capsys.readouterr().err
    for words in (["admin"], ["admin", "nap"], ["admin", "pause", "--mode", "maybe"], ["admin", "wake-up", "all"]):
        assert main(words) == 2
    assert main(["admin", "resume", "--server", "127.0.0.1:1"]) == 1
