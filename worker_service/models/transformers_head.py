"""Part a causal language model of transformers in two: what leads to its scores, and its scores of some tokens.

transformers' forward does both at once, with whatever comes behind the projection: scales, caps. Here it is called for
each half, with the other half replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from worker_service.models.layers import exact_at_top
from worker_service.tensor_group import TensorGroup


class _Hidden:
    """What the body of a model returns, as far as a projection looks at it."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: object) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class SplitHead(Module):
    """In the place of a model's projection to scores: takes what comes to it, or scores what it is given."""

    def __init__(self, projection: Linear, *, rank: int, world_size: int, group: TensorGroup, is_split: bool) -> None:
        super().__init__()
        self.projection = projection
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._is_split = is_split
        self._given: Tensor | None = None
        self._taken: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Some models read the type of the scores from it."""
        return self.projection.weight

    def take(self) -> Tensor:
        """Return what came to the projection, [num_tokens, hidden_size]."""
        taken, self._taken = self._taken, None
        assert taken is not None, "the model does not call its projection"
        return taken

    def give(self, hidden: Tensor | None) -> None:
        """Score ``hidden`` [num_rows, hidden_size] from now on; None: take what comes."""
        self._given = hidden

    @property
    def given(self) -> Tensor | None:
        """What is to be scored."""
        return self._given

    def forward(self, x: Tensor) -> Tensor:
        if self._given is None:
            self._taken = x[0]
            return x.new_zeros(1, 1, 1)
        scores = self._scores(self._given)
        return x.new_zeros(1, 1, 1) if scores is None else scores[None]

    def _scores(self, hidden: Tensor) -> Tensor | None:
        if not self._is_split and self._rank:
            return None
        weight, bias = self.projection.weight, self.projection.bias
        hidden = hidden.to(weight.dtype)
        if hidden.is_cuda and weight.dtype is not torch.float32:
            scores = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # not rounded at all
        else:
            scores = exact_at_top(functional.linear(hidden, weight), hidden, weight)
        if bias is not None:
            scores = scores + bias.float()
        if not self._is_split:
            return scores
        gathered = self._group.gather(scores.contiguous())
        return None if gathered is None else torch.cat(gathered, dim=1)


class SplitModel:
    """A causal language model whose projection was replaced by a ``SplitHead``."""

    def __init__(self, causal: Any, body: Module, head: SplitHead) -> None:
        self.causal = causal
        self.head = head
        compute = body.forward

        def forward(*arguments: Any, **named: Any) -> Any:
            return compute(*arguments, **named) if head.given is None else _Hidden(head.given[None])

        body.forward = forward

    def hidden(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size], what scores are made of."""
        self.causal(input_ids=input_ids.long()[None], position_ids=positions[None], use_cache=False)
        return self.head.take()

    def scores(self, hidden: Tensor) -> Tensor | None:
        """Return [num_rows, vocab_size] float32 on rank 0; None on the others."""
        self.head.give(hidden)
        try:
            dummy = torch.zeros((1, 1), dtype=torch.long, device=hidden.device)
            scores: Tensor = self.causal(input_ids=dummy, position_ids=dummy, use_cache=False).logits[0]
        finally:
            self.head.give(None)
        return scores.float() if self.head._rank == 0 else None
