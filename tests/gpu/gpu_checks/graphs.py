"""Steps replayed from graphs give what the same steps give launched kernel by kernel."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from gpu_checks.loaded import Loaded, shape_for
from gpu_checks.outcome import Report
from support.steady_traffic import serve
from worker_service.forward.assemble import ForwardOptions

# Of the logits of one position, in relative norm: a graph computes a few rows of padding beside them.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


class Scores:
    """Logits that a runner computes, as it samples from them."""

    def __init__(self, runner: Any) -> None:
        self.kept: list[torch.Tensor] = []
        outputs = runner._outputs
        compute = outputs.compute_logits

        def remember(hidden: torch.Tensor) -> torch.Tensor | None:
            scores: torch.Tensor | None = compute(hidden)
            if scores is not None:
                self.kept.append(scores.clone())
            return scores

        outputs.compute_logits = remember


def options_for(device: str) -> dict[str, Any]:
    """Return what makes the CPU record: its operations, with the memory that they had."""
    if device != "cpu":
        return {}
    from support.recorders import OpRecorder

    return {"forward": ForwardOptions(recorder=OpRecorder(), attention_backend="torch")}


def run(device: str, report: Report) -> None:
    shape = shape_for(device)
    with tempfile.TemporaryDirectory() as directory:
        options = options_for(device)
        loaded = Loaded(device, Path(directory), shape, num_blocks=300, capture_sizes=(8, 4, 1), **options)
        graphs = loaded.runner._forward.graphs  # type: ignore[union-attr]
        assert graphs is not None
        scores = Scores(loaded.runner)
        replayed: list[int] = []
        replay = graphs.replay

        def counted(size: int, step: Any) -> torch.Tensor:
            replayed.append(size)
            return replay(size, step)

        graphs.replay = counted  # type: ignore[method-assign]
        stepper = loaded.stepper(ahead=1)
        by_graphs = serve(stepper)
        stepper.close()
        of_graphs = scores.kept.copy()
        scores.kept.clear()
        num_replayed = len(replayed)
        graphs.clear()
        stepper = loaded.stepper(ahead=1)
        one_by_one = serve(stepper)
        stepper.close()
    assert num_replayed >= 20, f"only {num_replayed} steps were replayed"
    assert len(replayed) == num_replayed, "graphs were replayed after they were cleared"
    worst = 0.0
    for ours, theirs, tokens, twins in zip(of_graphs, scores.kept, by_graphs, one_by_one, strict=True):
        worst = max(worst, float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max()))
        if tokens != twins:
            break  # a near tie: what follows has other inputs
    assert worst <= _TOLERANCE[loaded.facts.dtype], f"logits differ by {worst:.2e} of their norm"
    report.facts["steps replayed"] = num_replayed
    report.facts["logits differ at most by"] = f"{worst:.1e} of their norm, in {loaded.facts.dtype}"
    report.facts["steps with other tokens"] = sum(a != b for a, b in zip(by_graphs, one_by_one, strict=True))
    report.facts["graphs, MiB"] = round(loaded.graph_bytes / 2**20, 1)
    if device == "cpu":
        report.not_run.append("CUDA graphs: needs a device (here torch's operations are recorded)")
