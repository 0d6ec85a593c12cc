"""Compare output with transformers on the same weights, as rule (c) of docs/equality.md words it.

Outputs are equal, or part at a near tie: the scores after noise of the two tokens differ by less than 1e-3 in float32,
in at most one of fifty requests begun, and nothing after the parting is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from support.scripted_reference import gumbel_noise

NEAR_TIE = 1e-3


def first_parting(model: Any, prompt: Sequence[int], output: Sequence[int], *, seed: int | None = None) -> float | None:
    """Return by how much the first token that is not the model's own choice falls short; None if all are its choice.

    One teacher-forced forward over prompt and output asks of each position what ``generate`` would ask, since up to the
    first parting both have the same tokens before them. With a seed the choice is a draw at temperature 1.
    """
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output]])
        scores = model(ids).logits[0, len(prompt) - 1 : -1].float()
    if seed is not None:
        positions = range(len(prompt), len(prompt) + len(output))
        scores = scores + torch.tensor([gumbel_noise(seed, 0, at, scores.shape[1]) for at in positions])
    chosen = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
    best = scores.max(dim=1).values
    short = [float(gap) for gap in best - chosen if gap > 0]
    return short[0] if short else None


def assert_greedy(model: Any, outputs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Assert rule (c) for (prompt, output) pairs of requests that ended by length."""
    assert_near_ties([first_parting(model, prompt, output) for prompt, output in outputs])


def assert_near_ties(partings: Sequence[float | None]) -> None:
    """Assert rule (c) for the first partings of requests."""
    gaps = [gap for gap in partings if gap is not None]
    assert all(gap < NEAR_TIE for gap in gaps), gaps
    assert len(gaps) <= math.ceil(len(partings) / 50), gaps
