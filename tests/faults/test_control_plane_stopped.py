"""The control plane is stopped and continued (cases A10): it gives no verdict out of its own silence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.control_plane_process import ControlPlaneProcess
from support.faults import SHORT_TIMES, is_alive

# Longer than the heartbeat timeout, the lease and the step's budget together.
STOPPED_S = sum(SHORT_TIMES.values())


@pytest.fixture
def control_planes() -> Iterator[tuple[ControlPlaneProcess, ControlPlaneProcess]]:
    with closing(ControlPlaneProcess()) as first, closing(ControlPlaneProcess()) as second:
        yield first, second


def test_stopped_control_plane_goes_on_without_a_verdict(
    control_planes: tuple[ControlPlaneProcess, ControlPlaneProcess],
) -> None:
    # The first is stopped alone, the second with its worker, as when a whole machine is paused.
    workers = [each.hear("worker_pid") for each in control_planes]
    directories = [Path(each.said[0]["directory"]) for each in control_planes]
    stopped = [*(each.pid for each in control_planes), workers[1]]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)  # the fault itself takes this time; nothing is waited for
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    before = [each.hear("step") for each in control_planes]
    watched_until = time.monotonic() + SHORT_TIMES["heartbeat_timeout_s"] + 0.5  # over the time without an opinion
    while time.monotonic() < watched_until:
        after = [each.hear("step") for each in control_planes]  # fails if a loss is said
    assert after > before
    for each, worker, directory in zip(control_planes, workers, directories, strict=True):
        each.finish()
        assert not is_alive(worker)
        assert not directory.exists()
