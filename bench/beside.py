"""Send the loads of the table to servers that are up at once, in turns, and bring home the figures."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from goals import line_of
from load import Door, Length, make_prompts, run_closed, run_open, send
from report import percentile, summarize
from rows import Beside, Load, Sweep

CAPACITY_CONCURRENCY = 64
NUM_QUANTILES = 50  # of a distribution, for a plot
_WARM_UP_TOKENS = 8
# Before a run all servers must rest. vLLM's threads take a whole core for one more second after its last token, and who
# is measured in that second has half of the machine.
_REST_WINDOW_S = 0.5
_REST_SHARE = 0.1  # of a core, of all servers together
_REST_TIMEOUT_S = 20.0


class Side(Protocol):
    """What is measured: a server that answers."""

    name: str
    door: Door
    vocab_size: int

    def is_alive(self) -> bool:
        """Whether its process lives."""

    def cpu_s(self) -> float:
        """Return the processor time of all its processes."""


class RowFailedError(Exception):
    """A row could not be measured; its words say why."""


async def run_load(side: Side, load: Load, seed: str, rate: float | None = None) -> dict[str, Any]:
    """Send one run's load and return its figures. Raises ``RowFailedError`` where any request failed.

    ``seed`` names the row: prompts of rows of the same lengths would else be the same, and lie in caches.
    """
    prompts = make_prompts(
        load.num_requests, load.input_len, load.output_len, side.vocab_size, seed, rate, load.shared_prefix_len
    )
    if load.prefix_is_warm:
        await send(side.door, replace(prompts[0], token_ids=prompts[0].token_ids[: load.shared_prefix_len + 1]))
    began = time.perf_counter()
    outcomes = await (run_open(side.door, prompts) if rate else run_closed(side.door, prompts, load.concurrency))
    figures = summarize(side.name, outcomes, time.perf_counter() - began)
    if figures["num_failed"]:
        lost = "" if side.is_alive() else "; its process has ended"
        raise RowFailedError(
            f"{side.name}: {figures['num_failed']} of {load.num_requests} requests failed: {figures['errors'][0]}{lost}"
        )
    good = [outcome for outcome in outcomes if not outcome.error]
    figures["quantiles_ms"] = {
        "ttft": quantiles([outcome.first - outcome.began for outcome in good]),
        "itl": quantiles([gap for outcome in good for gap in outcome.gaps_s]),
    }
    return figures


def quantiles(seconds: Sequence[float]) -> list[float]:
    """Return milliseconds at equal steps of the share of values that are no larger."""
    steps = [100 * (number + 1) / NUM_QUANTILES for number in range(NUM_QUANTILES)]
    return [round(1000 * percentile(seconds, percent), 3) for percent in steps] if seconds else []


async def until_at_rest(sides: Sequence[Side]) -> None:
    """Wait until no server computes. Raises ``RowFailedError`` where one does not stop."""
    deadline, shares = time.monotonic() + _REST_TIMEOUT_S, [1.0]
    while sum(shares) > _REST_SHARE:
        if time.monotonic() > deadline:
            busiest = max(zip(shares, (side.name for side in sides), strict=True))
            raise RowFailedError(
                f"{busiest[1]} takes {busiest[0]:.0%} of a core, with no request for {_REST_TIMEOUT_S:g} s"
            )
        before, began = [side.cpu_s() for side in sides], time.monotonic()
        await asyncio.sleep(_REST_WINDOW_S)
        took_s = time.monotonic() - began
        shares = [(side.cpu_s() - earlier) / took_s for side, earlier in zip(sides, before, strict=True)]


async def warm_up(side: Side, load: Load, seed: str) -> None:
    """Send a few short requests of the load's shape, uncounted: who builds something at first use has built it."""
    concurrency = load.concurrency or 8
    short = replace(
        load,
        num_requests=max(concurrency, 4),
        concurrency=concurrency,
        output_len=Length(_WARM_UP_TOKENS, _WARM_UP_TOKENS),
    )
    await run_load(side, short, seed)


async def run_beside(row: Beside, sides: Sequence[Side], num_pairs: int, seed: int) -> list[dict[str, Any]]:
    """Measure so many pairs, and return the row's lines."""
    ours, peer = sides
    for side in sides:
        await warm_up(side, row.load, f"{row.bench} warm-up {seed}")
    rate = None
    details: dict[str, Any] = {}
    if row.load.share_of_capacity:
        flood = replace(row.load, concurrency=CAPACITY_CONCURRENCY)
        capacity = (await run_load(peer, flood, f"{row.bench} capacity {seed}"))["requests_per_s"]
        rate = row.load.share_of_capacity * capacity
        details |= {"peer_capacity_requests_per_s": capacity, "rate_per_s": round(rate, 4)}
        _say(f"{row.bench}: {peer.name} can do {capacity:.2f} requests/s, so {rate:.2f} are sent to each")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for pair in range(num_pairs):
        runs: dict[str, dict[str, Any]] = {}
        # Whoever goes first goes second next time: a machine that warms up or throttles favours nobody.
        for side in (ours, peer) if pair % 2 == 0 else (peer, ours):
            await until_at_rest(sides)
            runs[side.name] = await run_load(side, row.load, f"{row.bench} {seed + pair}", rate)
        pairs.append((runs[ours.name], runs[peer.name]))
        shown = [
            f"{figure.suffix} {figure.of(pairs[-1][0]) or 0:.1f} / {figure.of(pairs[-1][1]) or 0:.1f} {figure.unit}"
            for figure in row.figures
        ]
        _say(f"{row.bench}: pair {pair + 1} of {num_pairs}, {ours.name} / {peer.name}: {', '.join(shown).strip()}")
    lines = []
    for number, figure in enumerate(row.figures):
        values = [(figure.of(mine), figure.of(theirs)) for mine, theirs in pairs]
        # The runs once, not with every figure that is taken from them.
        more = details | ({"runs": [list(pair) for pair in pairs]} if number == 0 else {})
        lines.append(line_of(row.bench, figure, values, {"servers": [ours.name, peer.name], **more}))
    return lines


async def run_sweep(row: Sweep, sides: Sequence[Side], seed: int) -> list[dict[str, Any]]:
    """Measure every server at every concurrency, once, and return one line of all points."""
    points: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for concurrency in row.concurrencies:
        load = replace(row.load, concurrency=concurrency, num_requests=max(2 * concurrency, 4))
        for side in sides:
            await until_at_rest(sides)
            figures = await run_load(side, load, f"{row.bench} {concurrency} {seed}")
            points[side.name].append([concurrency, figures["output_tokens_per_s"]])
        shown = ", ".join(f"{name} {found[-1][1]:.1f}" for name, found in points.items())
        _say(f"{row.bench}: {concurrency} at once: {shown} tokens/s")
    best = [max(tokens for _, tokens in points[side.name]) for side in sides]
    return [
        {
            "bench": row.bench,
            "ours": best[0],
            "peer": best[1] if len(best) > 1 else None,
            "ratio": round(best[0] / best[1], 4) if len(best) > 1 else None,
            "goal": None,
            "unit": "tokens/s",
            "passed": None,
            "points": points,
        }
    ]


def _say(text: str) -> None:
    print(f"    {text}", file=sys.stderr, flush=True)


async def within(timeout_s: float, lines: Any) -> list[dict[str, Any]]:
    """Await a row's lines, but no longer than so. Raises ``RowFailedError``."""
    try:
        async with asyncio.timeout(timeout_s):
            found: list[dict[str, Any]] = await lines
            return found
    except TimeoutError as error:
        raise RowFailedError(f"it was not done within {timeout_s:g} s") from error
