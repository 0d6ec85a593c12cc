"""Compare greedy output with transformers on the same weights, as rule (c) of docs/equality.md words it.

Outputs are equal, or part at a near tie: the scores of the two tokens differ by less than 1e-3 in float32, in at most
one of fifty requests begun, and nothing after the parting is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NEAR_TIE = 1e-3


def first_parting(model: Any, prompt: Sequence[int], output: Sequence[int]) -> float | None:
    """Return by how much the first token that is not the model's own choice falls short; None if all are its choice.

    One teacher-forced forward over prompt and output asks of each position what ``generate`` would ask, since up to the
    first parting both have the same tokens before them.
    """
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    best = logits.max(dim=1).values
    short = [float(gap) for gap in best - chosen if gap > 0]
    return short[0] if short else None


def assert_greedy(model: Any, outputs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Assert rule (c) for (prompt, output) pairs of requests that ended by length."""
    partings = [gap for prompt, output in outputs if (gap := first_parting(model, prompt, output)) is not None]
    assert all(gap < NEAR_TIE for gap in partings), partings
    assert len(partings) <= math.ceil(len(outputs) / 50), partings
