"""Steps that are launched ahead of their outcomes give the same tokens and digests as steps that are waited for."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu_checks.loaded import Loaded, shape_for
from gpu_checks.outcome import Report
from support.steady_traffic import serve
from support.stepper import Stepper


def launched_ahead(stepper: Stepper) -> list[int]:
    """Note how many steps are launched whenever one is."""
    seen: list[int] = []
    watch = stepper.loop._landings.watch

    def noting(pending: object) -> None:
        seen.append(len(stepper.loop._launched))
        watch(pending)  # type: ignore[arg-type]

    stepper.loop._landings.watch = noting  # type: ignore[method-assign]
    return seen


def run(device: str, report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        loaded = Loaded(device, Path(directory), shape_for(device), num_blocks=300)
        one_by_one = loaded.stepper(ahead=1)
        expected = serve(one_by_one)
        one_by_one.close()
        ahead = loaded.stepper(ahead=3)
        seen = launched_ahead(ahead)
        tokens = serve(ahead)
        ahead.close()
    assert tokens == expected, "other tokens with steps in flight"
    digests = [[done.token_digest for done in stepper.completed] for stepper in (one_by_one, ahead)]
    assert digests[0] == digests[1]
    report.facts["steps"] = len(tokens)
    report.facts["launched before the step before them was done"] = sum(count > 1 for count in seen)
    if device == "cpu":
        report.not_run.append("outcomes that stay on the device: needs a device (a unit test has a fake one)")
    else:
        assert any(count > 1 for count in seen), "no step was launched ahead"
