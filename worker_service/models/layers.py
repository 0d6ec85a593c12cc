"""Linear layers and the embedding: weights in their final form, and how each is split over the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker_service.models.checkpoint import Slot

# Rows of one tile under --batch-invariant. A matrix product of exactly this many rows gives a row the same bits
# whatever the other rows hold and wherever it stands; other heights choose other kernels and orders of summation.
INVARIANT_ROWS = 64
# Rows that the packed layout is chosen for. All linears of the demo model, packed against plain, in ms on two Zen 5
# cores: bfloat16 8.0 / 11.7 at 1 row, 15.9 / 20.3 at 32, 163 / 168 at 512; float32 10 / 33, 30 / 73, 334 / 782.
_PACKED_FOR_ROWS = 32
_MOST_REFINED = 64  # scores of one row that are computed again


@dataclass(frozen=True, slots=True)
class Placement:
    """Where tensors live and which part of a layer this rank holds."""

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1
    batch_invariant: bool = False

    def share(self, size: int, what: str) -> int:
        """Return this rank's part of a dimension that is split evenly."""
        assert size % self.world_size == 0, f"{what}: {size} over {self.world_size} ranks"
        return size // self.world_size

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def part(self, target: Tensor, dim: int) -> Slot:
        """Return the slot of this rank's part, along ``dim``, of a tensor of the checkpoint."""
        return Slot(target) if self.world_size == 1 else Slot(target, dim, self.rank, self.world_size)


class Linear:
    """``y = x W^T + b`` for ``x`` [num_tokens, in_features]. Either size may be this rank's part of the model's."""

    def __init__(self, placement: Placement, in_features: int, out_features: int, *, bias: bool) -> None:
        self.weight = placement.empty(out_features, in_features)
        self.bias = placement.empty(out_features) if bias else None
        self._placement = placement
        self._packed: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, in whichever form they are kept."""
        tensors = [self.weight if self._packed is None else self._packed, self.bias]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def pack(self, *, keep_weight: bool = False) -> None:
        """Reorder the weight for oneDNN where that helps; the plain one is let go unless somebody else needs it."""
        placement = self._placement
        if placement.device.type != "cpu" or not _can_pack(placement.dtype):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_ROWS)
        if not keep_weight:
            self.weight = placement.empty(0, 0)

    def __call__(self, x: Tensor) -> Tensor:
        return self._in_tiles(x) if self._placement.batch_invariant else self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def _in_tiles(self, x: Tensor) -> Tensor:
        missing = -len(x) % INVARIANT_ROWS
        padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
        tiles = [self._multiply(tile) for tile in torch.split(padded, INVARIANT_ROWS)]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[: len(x)].contiguous()


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class FusedLinear(Linear):
    """Several projections of one input, their outputs side by side; each split over the ranks by columns."""

    def __init__(self, placement: Placement, in_features: int, parts: dict[str, int], *, bias: bool) -> None:
        """Take the outputs of each part in the whole model; the split must come out even."""
        self._parts = {name: placement.share(size, name) for name, size in parts.items()}
        super().__init__(placement, in_features, sum(self._parts.values()), bias=bias)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return where ``<prefix><part>.weight`` and ``.bias`` of the checkpoint go."""
        result: dict[str, Slot] = {}
        start = 0
        for name, size in self._parts.items():
            for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
                if tensor is not None:
                    result[f"{prefix}{name}.{kind}"] = self._placement.part(tensor[start : start + size], 0)
            start += size
        return result


class RowLinear(Linear):
    """A projection whose input is split over the ranks: partial results are to be summed over them."""

    def __init__(self, placement: Placement, in_features: int, out_features: int, *, bias: bool) -> None:
        """Take the sizes in the whole model."""
        super().__init__(placement, placement.share(in_features, "inputs"), out_features, bias=bias)

    def slots(self, name: str) -> dict[str, Slot]:
        result = {f"{name}.weight": self._placement.part(self.weight, 1)}
        if self.bias is not None:
            result[f"{name}.bias"] = Slot(self.bias)
        return result


class VocabLinear(Linear):
    """The projection to scores of the vocabulary, split by ids; its weight may be the embedding's."""

    def __init__(self, placement: Placement, hidden_size: int, vocab_size: int, *, tied_to: Tensor | None) -> None:
        rows = placement.share(vocab_size, "vocabulary")
        super().__init__(placement, hidden_size, rows if tied_to is None else 0, bias=False)
        self._tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to

    def slots(self, name: str) -> dict[str, Slot]:
        return {} if self._tied else {f"{name}.weight": self._placement.part(self.weight, 0)}

    def pack(self, *, keep_weight: bool = True) -> None:
        super().pack(keep_weight=keep_weight)

    @property
    def num_bytes(self) -> int:
        plain = 0 if self._tied else self.weight.numel() * self.weight.element_size()
        packed = 0 if self._packed is None else self._packed.numel() * self._packed.element_size()
        return plain + packed

    def scores(self, x: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] float32 scores; where ``x`` is of less precision, the highest are made exact.

        A product rounded to bfloat16 has steps of 0.125 at a score of 25, so that 7 % of all positions end in a tie at
        the top, which the lowest id would win. What lies within a step of the highest is computed again in float32.
        """
        scores = self(x)
        if scores.dtype is torch.float32:
            return scores
        step = torch.finfo(scores.dtype).eps
        scores = scores.float()
        top = scores.amax(dim=-1, keepdim=True)
        near = scores >= top - step * top.abs()
        near &= near.sum(dim=-1, keepdim=True) <= _MOST_REFINED  # a flat row has nothing to decide
        rows, ids = near.nonzero(as_tuple=True)
        scores[rows, ids] = (x[rows].float() * self.weight[ids].float()).sum(dim=-1)
        return scores
