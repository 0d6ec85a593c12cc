"""Turn outcomes into figures, and figures into a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from load import Outcome

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarize(name: str, outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Return the figures of one run. Latencies of failed requests count nowhere; the failures do."""
    good = [outcome for outcome in outcomes if not outcome.error]
    output = sum(outcome.num_output_tokens for outcome in good)
    prompts = sum(outcome.num_input_tokens for outcome in good)
    latencies = {
        "ttft_s": [outcome.first - outcome.began for outcome in good],
        "itl_s": [gap for outcome in good for gap in outcome.gaps_s],
        "e2e_s": [outcome.ended - outcome.began for outcome in good],
    }
    return {
        "server": name,
        "num_requests": len(outcomes),
        "num_failed": len(outcomes) - len(good),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:5],
        "duration_s": round(duration_s, 3),
        "num_input_tokens": prompts,
        "num_output_tokens": output,
        "output_tokens_per_s": round(output / duration_s, 2),
        "prompt_tokens_per_s": round(prompts / duration_s, 2),
        "total_tokens_per_s": round((output + prompts) / duration_s, 2),
        "requests_per_s": round(len(good) / duration_s, 3),
        **{
            name: {f"p{percent}": round(percentile(values, percent), 6) for percent in PERCENTILES}
            for name, values in latencies.items()
        },
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the runs side by side, for people. Milliseconds as p50 / p90 / p99."""
    head = f"{'server':<16}{'ok':>8}{'out tok/s':>11}{'TTFT ms':>26}{'ITL ms':>22}{'E2E ms':>28}"
    lines = [head, "-" * len(head)]
    for run in runs:
        times = {
            name: " / ".join(f"{1000 * run[name][f'p{percent}']:.{digits}f}" for percent in PERCENTILES)
            for name, digits in (("ttft_s", 0), ("itl_s", 1), ("e2e_s", 0))
        }
        ok = f"{run['num_requests'] - run['num_failed']}/{run['num_requests']}"
        lines.append(
            f"{run['server']:<16}{ok:>8}{run['output_tokens_per_s']:>11.1f}{times['ttft_s']:>26}{times['itl_s']:>22}"
            f"{times['e2e_s']:>28}"
        )
    return "\n".join(lines)


def compare(runs: Sequence[dict[str, Any]], ours: str, peer: str) -> dict[str, Any]:
    """Return the ratio of output tokens/s of each pair, and their median."""
    mine = [run["output_tokens_per_s"] for run in runs if run["server"] == ours]
    theirs = [run["output_tokens_per_s"] for run in runs if run["server"] == peer]
    ratios = [round(a / b, 3) if b else math.nan for a, b in zip(mine, theirs, strict=True)]
    return {"ratios": ratios, "median_ratio": statistics.median(ratios)}
