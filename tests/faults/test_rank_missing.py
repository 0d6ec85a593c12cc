"""One of two workers never appears (cases A7): the start ends at its deadline and names it, with its address."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from control_plane.announcement import Stopping
from control_plane.cli.announcements import from_json
from support.faults import is_alive
from support.remote_ranks import remote_ranks

DEADLINE_S = 2.0
COMMAND = [
    *(sys.executable, "-m", "control_plane.cli", "control-plane", "--model", "scripted", "--listen", "127.0.0.1:0"),
    *("--announce", "json", "--log-level", "error", "--startup-timeout-s", str(DEADLINE_S)),
]


def test_missing_worker_is_named_with_its_address_when_the_start_ends_at_its_deadline(tmp_path: Path) -> None:
    with remote_ranks(2, directory=tmp_path, start=False) as ranks:
        ranks.start(0)
        began = time.monotonic()
        command = [*COMMAND, "--worker-addresses", ",".join(ranks.addresses)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        took_s = time.monotonic() - began
        assert done.returncode == 1
        said = [from_json(line) for line in done.stdout.splitlines()]
        (stopping,) = [one for one in said if isinstance(one, Stopping)]
        assert stopping.reason.startswith("rank 1 failed at start: Describe: not found")
        assert ranks.addresses[1] in stopping.reason
        assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["group.not_formed"]
        assert DEADLINE_S < took_s < DEADLINE_S + 5.0  # the start of a process on a busy machine
        # The one that is there is not ours to end.
        assert is_alive(ranks.processes[0].pid)
