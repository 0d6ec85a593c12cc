"""The control plane is stopped and continued (cases A10): it gives no verdict out of its own silence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.control_plane_process import ControlPlaneProcess
from support.faults import SETTINGS, is_alive

# Longer than the heartbeat timeout, the lease and the step's budget together.
STOPPED_S = SETTINGS.heartbeat_timeout_s + SETTINGS.step_timeout_s + 1.0


@pytest.fixture
def control_plane() -> Iterator[ControlPlaneProcess]:
    process = ControlPlaneProcess()
    yield process
    process.close()


@pytest.mark.parametrize("whole_machine", [False, True], ids=["control-plane", "control-plane-and-worker"])
def test_stopped_control_plane_goes_on_without_a_verdict(
    control_plane: ControlPlaneProcess, whole_machine: bool
) -> None:
    worker_pid = control_plane.hear("worker_pid")
    directory = Path(control_plane.said[0]["directory"])
    control_plane.hear("step")
    stopped = [control_plane.pid, worker_pid] if whole_machine else [control_plane.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)  # the fault itself takes this time; nothing is waited for
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    before = control_plane.hear("step")
    continued_at = time.monotonic()
    while time.monotonic() < continued_at + SETTINGS.heartbeat_timeout_s + 0.5:  # over the time without an opinion
        after = control_plane.hear("step")  # fails if a loss is said
    assert after > before
    control_plane.finish()
    assert not is_alive(worker_pid)
    assert not directory.exists()
