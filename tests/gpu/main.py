"""Run the checks of a device one after another, each in a process of its own, and say what came out.

On the CPU (``--device cpu``) they run in this process, with small shapes: it shows that the script works, and all that
does not need a device. A check that cannot run says what it needs. The last line is one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpu_checks.listed import CHECKS, NEEDS_TWO_DEVICES, Check
from gpu_checks.outcome import FAILED, NEEDS_DEVICE, NOT_RUN, PASSED, NotRun, Outcome, Report, outcome_of

BUDGET_S = 360.0


def missing_modules(check: Check) -> list[str]:
    """Return what a check imports and is not there, found without importing what is."""
    missing = []
    for name in check.needs:
        try:
            if importlib.util.find_spec(name) is None:
                missing.append(name)
        except ModuleNotFoundError as error:  # a package on the way to it, or what that imports
            missing.append(error.name or name)
    return missing


def quiet_logs() -> None:
    """Let checks speak and nobody else: some of them make things fail on purpose."""
    with contextlib.suppress(ModuleNotFoundError):
        import structlog

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def run_here(check: Check, device: str) -> Outcome:
    """Run a check in this process."""
    report, began = Report(), time.monotonic()
    try:
        if device == "cpu" and not check.on_cpu:
            raise NotRun(NEEDS_DEVICE)
        missing = missing_modules(check)
        if missing:
            raise NotRun(f"needs {', '.join(missing)}: see tests/gpu/requirements.txt")
        check.load()(device, report)
        status, reason = PASSED, ""
    except NotRun as error:
        status, reason = NOT_RUN, str(error)
    except ModuleNotFoundError as error:
        status, reason = NOT_RUN, f"needs {error.name}: see tests/gpu/requirements.txt"
    except Exception as error:
        traceback.print_exc()
        status, reason = FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Outcome(name=check.name, status=status, reason=reason, duration_s=time.monotonic() - began, report=report)


def run_apart(check: Check, device: str, limit_s: float) -> Outcome:
    """Run a check in a process of its own: what it breaks of the device is gone with it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "outcome.json"
        words = [sys.executable, __file__, "--device", device, "--child", check.name, "--json", str(told)]
        try:
            code = subprocess.run(words, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            reason = f"did not end within {limit_s:.0f} s"
            return Outcome(name=check.name, status=FAILED, reason=reason, duration_s=time.monotonic() - began)
        if told.exists():
            return outcome_of(json.loads(told.read_text()))
        reason = f"its process ended with {code} and said nothing"
        return Outcome(name=check.name, status=FAILED, reason=reason, duration_s=time.monotonic() - began)


def print_outcome(outcome: Outcome, device: str) -> None:
    reason = f": {outcome.reason}" if outcome.reason else ""
    print(f"  {outcome.status}{reason} ({outcome.duration_s:.1f} s)")
    for name, value in outcome.report.facts.items():
        print(f"    {name}: {value}")
    for part in outcome.report.not_run:
        print(f"    not run: {part}")
    for aim in outcome.report.aims:
        print(f"    {aim if device != 'cpu' else f'{aim.name}: {aim.value:.1%} (a rehearsal: not judged)'}")


def summary(outcomes: Sequence[Outcome], device: str, duration_s: float) -> dict[str, object]:
    """Return what the last line says."""
    judged = device != "cpu"
    counts = {status: sum(one.status == status for one in outcomes) for status in (PASSED, FAILED, NOT_RUN)}
    aims = [aim for one in outcomes for aim in one.report.aims]
    return {
        "device": device,
        **{status.replace(" ", "_"): count for status, count in counts.items()},
        "aims_met": sum(aim.is_met for aim in aims) if judged else None,
        "aims": len(aims) if judged else None,
        "duration_s": round(duration_s, 1),
        "needs_two_devices": list(NEEDS_TWO_DEVICES),
        "checks": [one.as_dict() for one in outcomes],
    }


def parser() -> argparse.ArgumentParser:
    names = [check.name for check in CHECKS]
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse (default cuda)")
    made.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the last line there, too")
    made.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="SECONDS", help="for all (default 360)")
    made.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run them; return 1 if one failed, 2 if a device was asked for and none is there."""
    options = parser().parse_args(words)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet_logs()
    if options.child:
        outcome = run_here(next(check for check in CHECKS if check.name == options.child), options.device)
        options.json.write_text(json.dumps(outcome.as_dict()))
        sys.stdout.flush()
        os._exit(0)  # a device that hangs holds nobody
    if options.device == "cuda" and not _has_device():
        print("no CUDA device that torch can use is here: --device cpu rehearses without one")
        return 2
    began, outcomes = time.monotonic(), []
    for check in CHECKS:
        if options.only and check.name not in options.only:
            continue
        print(f"{check.name}: {check.about}", flush=True)
        left_s = options.budget_s - (time.monotonic() - began)
        if left_s < 1:
            outcome = Outcome(name=check.name, status=NOT_RUN, reason=f"the {options.budget_s:.0f} s were over")
        elif options.device == "cpu":
            outcome = run_here(check, options.device)
        else:
            outcome = run_apart(check, options.device, min(left_s, check.limit_s))
        print_outcome(outcome, options.device)
        outcomes.append(outcome)
    for what in NEEDS_TWO_DEVICES:
        print(f"not run: {what}: needs two devices")
    line = json.dumps(summary(outcomes, options.device, time.monotonic() - began))
    if options.json:
        options.json.write_text(line + "\n")
    print(line)
    return 1 if any(one.status == FAILED for one in outcomes) else 0


def _has_device() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
