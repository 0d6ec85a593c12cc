"""Random faults under random traffic for a minute: every stream is accounted for. ``make soak`` takes ten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.timeout(240)
def test_every_stream_is_accounted_for_whatever_is_killed_stopped_and_dropped() -> None:
    command = [sys.executable, str(BENCH / "soak.py"), "--duration-s", "50", "--seed", "3", "--mean-pause-s", "2.5"]
    done = subprocess.run([*command, "--clients", "6"], capture_output=True, text=True, timeout=220)
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == []
    assert done.returncode == 0
    assert result["num_unaccounted"] == 0
    assert sum(result["outcomes"].values()) == result["num_requests"]
    # Something happened, and something was served meanwhile.
    assert sum(result["faults"].values()) >= 8
    assert {"rank killed", "control plane killed"} <= set(result["faults"])
    assert result["outcomes"]["finished"] > 100
