"""The control plane is killed (cases A5): its workers are its children, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.control_plane_process import ControlPlaneProcess
from support.faults import assert_next_group_works, is_alive


@pytest.fixture
def control_plane() -> Iterator[ControlPlaneProcess]:
    process = ControlPlaneProcess()
    yield process
    process.close()


@pytest.mark.parametrize("worker_is_stopped", [False, True], ids=["serving", "worker-stopped-first"])
def test_killed_control_plane_leaves_no_worker_and_no_file(
    control_plane: ControlPlaneProcess, worker_is_stopped: bool
) -> None:
    started = control_plane.hear("worker_pid")
    directory = Path(control_plane.said[0]["directory"])
    assert control_plane.hear("step")
    assert is_alive(started)
    assert directory.exists()
    if worker_is_stopped:
        os.kill(started, signal.SIGSTOP)
    os.kill(control_plane.pid, signal.SIGKILL)
    if worker_is_stopped:
        os.kill(started, signal.SIGCONT)
    deadline = time.monotonic() + 5.0
    while (is_alive(started) or directory.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(started)
    assert not directory.exists()


async def test_next_group_works_after_a_kill() -> None:
    await assert_next_group_works()
