"""The program that measures faults measures, and knows a missed limit when it sees one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_quick_form_runs_and_stays_within_the_limits() -> None:
    command = [sys.executable, str(BENCH / "faults.py"), "--quick", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--cases", "rank-killed", "takeover-after-kill"], capture_output=True, text=True, timeout=110
    )
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["server"], result["ranks"]) == ("maniple", 2)
    killed, taken_over = result["cases"]
    assert [figure["name"] for figure in killed["figures"]] == [
        "last stream ended", "not ready", "ranks gone after that"
    ]  # fmt: skip
    assert [figure["name"] for figure in taken_over["figures"]] == ["ready", "of that, protocol"]
    assert killed["wrong"] == taken_over["wrong"] == []
    assert done.returncode == 0


def case(worst_s: float | None, *wrong: str) -> dict[str, Any]:
    figure = {"name": "ready", "worst_s": worst_s, "limit_s": 2.0, "values_s": []}
    return {"case": "takeover", "repetitions": 1, "figures": [figure], "wrong": list(wrong)}


def test_missed_limits_and_wrong_ends_count_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from faults import is_missed, table

    assert not is_missed(case(2.0))
    assert is_missed(case(2.001))
    assert is_missed(case(None))
    assert is_missed(case(1.0, "a stream ended 2 times"))
    lines = table([case(1.5), case(None, "no server")]).splitlines()
    assert lines[2].split() == ["takeover", "ready", "1.500", "s", "2.000", "s"]
    assert lines[-1].strip() == "! no server"


def test_peer_stands_beside_ours_with_what_never_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from faults import is_missed, peer_command, table

    never = case(None, "3 of 8 streams did not end within 60 s")
    never["figures"][0]["over_s"] = 60.0
    ours = [case(1.5), {**case(0.25), "case": "another"}]
    lines = table(ours, [never]).splitlines()
    assert lines[0].split() == ["fault", "measured", "worst", "limit", "vllm"]
    assert lines[2].split() == ["takeover", "ready", "1.500", "s", "2.000", "s", ">", "60", "s"]
    assert lines[3].strip() == "vllm: 3 of 8 streams did not end within 60 s"
    assert lines[4].split() == ["another", "ready", "0.250", "s", "2.000", "s", "-"]
    assert is_missed(never)
    words = peer_command(Path("/opt/vllm"), "/tmp/a model", 2).split()
    assert words[0] == "env"
    assert "/opt/vllm/bin/vllm serve '/tmp/a model' --enforce-eager" in " ".join(words)
    assert words[-2:] == ["--tensor-parallel-size", "2"]
