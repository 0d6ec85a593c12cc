from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.executors.base import RankExit
from control_plane.executors.exit_board import ExitBoard
from control_plane.executors.private_directory import PrivateDirectory
from service_chassis.child_process import ChildProcess, exit_cause
from service_chassis.ids import Rank
from support.waiting import until

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1', "torch.OutOfMemoryError: no memory left"]
JSON_EVENT = '{"event": "step.failed", "exception": "Traceback ...\\n  File\\nValueError: bad row", "level": "error"}'


@pytest.mark.parametrize(
    ("code", "log_tail", "cause"),
    [
        (-9, TRACEBACK, "killed by SIGKILL"),
        (-6, [], "killed by SIGABRT"),
        (3, [], "exit code 3"),
        (0, TRACEBACK, "exit code 0"),
        (1, [*TRACEBACK, "worker.stopping"], "exit code 1, torch.OutOfMemoryError: no memory left"),
        (1, ["noise", JSON_EVENT, '{"event": "worker.stopping"}', "{broken"], "exit code 1, ValueError: bad row"),
        (1, ["An Error happened here", "ConnectionError"], "exit code 1, ConnectionError"),
    ],
)
def test_exit_cause_is_for_people(code: int, log_tail: list[str], cause: str) -> None:
    assert exit_cause(code, log_tail) == cause


async def start(program: str) -> tuple[ChildProcess, list[tuple[str, tuple[str, ...]]]]:
    exits: list[tuple[str, tuple[str, ...]]] = []
    child = await ChildProcess.start(["-c", program], pass_fds=(), on_exit=lambda *end: exits.append(end))
    return child, exits


async def test_child_reports_once_with_its_last_lines(capfd: pytest.CaptureFixture[str]) -> None:
    child, exits = await start("for i in range(60): print('line', i, flush=True)\nraise ValueError('enough')")
    await child.wait()
    await child.end(grace_s=0.1)
    [(cause, tail)] = exits
    assert cause == "exit code 1, ValueError: enough"
    assert len(tail) == 50
    assert tail[-1] == "ValueError: enough"
    forwarded = capfd.readouterr().err.splitlines()
    assert "line 0" in forwarded
    assert forwarded[-1] == "ValueError: enough"


async def test_child_does_not_get_the_token_of_the_model_hub(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MANIPLE_WORKER_DEVICE", "cpu")
    say = "import os; print('token', os.environ.get('HF_TOKEN'), os.environ['MANIPLE_WORKER_DEVICE'])"
    child = await ChildProcess.start(["-c", say], pass_fds=(), on_exit=lambda cause, tail: None)
    await child.wait()
    assert child.log_tail == ("token None cpu",)


async def test_child_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    child, exits = await start(program)
    await until(lambda: child.log_tail, "the child ignores SIGTERM")
    await child.end(grace_s=0.05)
    assert exits == [("killed by SIGKILL", ("ready",))]
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_line_longer_than_the_limit_does_not_end_the_log() -> None:
    child, exits = await start("print('x' * (3 << 20)); print('after')")
    await child.wait()
    assert exits[0][1][-1] == "after"


def test_exit_board_tells_late_subscribers_and_nobody_in_a_wanted_shutdown() -> None:
    board = ExitBoard()
    early: list[RankExit] = []
    late: list[RankExit] = []
    board.subscribe(early.append)
    first, second = RankExit(Rank(0), "exit code 1"), RankExit(Rank(1), "exit code 0")
    board.post(first)
    board.subscribe(late.append)
    board.silence()
    board.post(second)
    assert early == late == [first]


def test_private_directory_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = PrivateDirectory()
    assert directory.path.parent in (tmp_path, Path("/tmp"))
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    (directory.path / "rank0.sock").touch()
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_private_directory_sweeps_what_killed_makers_left_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(subprocess.check_output(["mktemp", "-d", "/tmp/base-XXXXXX"], text=True).strip())
    monkeypatch.setattr("tempfile.tempdir", str(base))
    try:
        program = (
            f"import tempfile; tempfile.tempdir = {str(base)!r}\n"
            "from control_plane.executors.private_directory import PrivateDirectory\n"
            "print(PrivateDirectory().path, flush=True)\n"
            "import os; os.kill(os.getpid(), 9)"
        )
        killed = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.PIPE, text=True)
        left = Path(killed.stdout.strip())
        assert left.is_dir()
        living = PrivateDirectory()  # sweeps
        assert not left.exists()
        other = PrivateDirectory()
        assert living.path.is_dir()
        living.remove()
        other.remove()
        assert not list(base.iterdir())
    finally:
        base.rmdir()


def test_private_directory_leaves_a_users_directory_of_a_like_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(subprocess.check_output(["mktemp", "-d", "/tmp/base-XXXXXX"], text=True).strip())
    monkeypatch.setattr("tempfile.tempdir", str(base))
    try:
        for name in ("maniple-models", "maniple-ranks-models"):
            (base / name).mkdir()
            (base / name / "weights").write_text("nobody holds a lock on this")
        PrivateDirectory().remove()
        assert (base / "maniple-models" / "weights").exists()
        assert (base / "maniple-ranks-models" / "weights").exists()
    finally:
        shutil.rmtree(base)
