"""The script for a GPU, rehearsed without one: it runs every check that it can, and says what the others need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "run.sh"


@pytest.fixture
def gpu_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def test_a_rehearsal_runs_all_that_needs_no_device_and_names_the_rest(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    words = [str(SCRIPT), "--device", "cpu", "--json", str(told)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    line: dict[str, Any] = json.loads(told.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == line
    by_name = {check["check"]: check for check in line["checks"]}
    needs_device = {name for name, check in by_name.items() if check["status"] == "not run"}
    assert needs_device == {"nccl", "abort"}
    assert {by_name[name]["reason"] for name in needs_device} == {"needs a device"}
    assert {check["status"] for name, check in by_name.items() if name not in needs_device} == {"passed"}
    # What a check leaves out on a CPU is said, too, and figures of a CPU are held to no aim.
    for name in ("kernels", "graphs", "steps in flight", "hot path"):
        assert any("needs a device" in part for part in by_name[name]["not_run"])
    assert line["aims"] is None
    aims = {aim["name"] for aim in by_name["floors"]["aims"]}
    assert {"decode of 1 rows, of bandwidth", "prefill of 128, of the matrix rate"} <= aims
    assert len(line["needs_two_devices"]) == 2


def test_without_a_device_nothing_is_judged_by_mistake() -> None:
    done = subprocess.run([str(SCRIPT), "--only", "surroundings"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--device cpu" in done.stdout


def test_what_is_missing_is_named_and_the_rest_runs(gpu_checks: None, tmp_path: Path) -> None:
    """An image without our dependencies: the checks that need them say so."""
    program = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("structlog", "grpc"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
sys.path.insert(0, {str(SCRIPT.parent)!r})
import main
sys.exit(main.main(["--device", "cpu", "--json", {str(tmp_path / "told.json")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    checks = json.loads((tmp_path / "told.json").read_text())["checks"]
    assert [check["check"] for check in checks if check["status"] == "passed"] == ["surroundings"]
    reasons = {check["check"]: check.get("reason", "") for check in checks}
    assert reasons["kernels"] == "needs structlog: see tests/gpu/requirements.txt"
    assert "tests/gpu/requirements.txt" in reasons["graphs"]
    assert reasons["nccl"] == "needs a device"


def test_a_profile_tells_waiting_calls_and_the_time_without_work(gpu_checks: None) -> None:
    from gpu_checks.profiled import Span, busy_share, hidden_waits

    spans = [
        Span("cudaGraphLaunch", 0, 2, on_device=False),
        Span("cudaStreamSynchronize", 3, 4, on_device=False),
        Span("cudaMemcpyAsync", 4, 5, on_device=False),
        Span("cudaStreamSynchronize", 6, 7, on_device=False),
        Span("cudaEventSynchronize", 6, 7, on_device=False),
        Span("cudaMemcpy", 8, 9, on_device=False),
        Span("cuLaunchKernelEx", 9, 10, on_device=False),
        Span("cudaDeviceSynchronize", 36, 37, on_device=False),  # of the profiler, when all is done
        Span("gemm", 10, 20, on_device=True),
        Span("copy", 12, 25, on_device=True),  # beside the first
        Span("gemm", 30, 35, on_device=True),
    ]
    assert hidden_waits(spans) == {"cudaStreamSynchronize": 2, "cudaMemcpy": 1}
    assert busy_share(spans) == 20 / 25
    assert busy_share([span for span in spans if not span.on_device]) == 0


def test_floors_are_what_a_shape_must_read_and_compute(gpu_checks: None) -> None:
    from gpu_checks.floors_8b import prefill_operations
    from gpu_checks.random_model import SHAPE_8B

    # 2 operations for each of 6 979 321 856 weights of the layers a token, 4 for each pair of query and key over 4096
    # dimensions and 32 layers, and the scores of one token.
    expected = 2 * 6_979_321_856 * 8192 + 32 * 4 * 4096 * 8192 * 8193 // 2 + 2 * 4096 * 128_256
    assert prefill_operations(SHAPE_8B, 8192) == expected


def test_aims_are_met_from_their_own_side(gpu_checks: None) -> None:
    from gpu_checks.outcome import Aim

    assert Aim(name="a", value=0.8, limit=0.8).is_met
    assert not Aim(name="a", value=0.79, limit=0.8).is_met
    assert Aim(name="a", value=0.05, limit=0.05, at_most=True).is_met
    assert "NOT MET" in str(Aim(name="a", value=0.06, limit=0.05, at_most=True))
