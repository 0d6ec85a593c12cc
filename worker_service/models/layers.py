"""Linear layers and the embedding: weights in their final form, and how each is split over the ranks of a group.

A pair of layers costs one exchange: the first is split by outputs (``FusedLinear``), each rank goes on with its own,
the second is split by inputs (``RowLinear``), and the partial results are added up. Embedding and scores are split by
ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from maniple_kernels.decoder_layer import LinearWeights
from maniple_kernels.linear import fits_panels, multiply_panels, pack_panels
from maniple_kernels.quantized_linear import GroupedWeights, dequantize, quantized_linear
from worker_service.models.checkpoint import Slot
from worker_service.models.quantization import BlockRows, Quantization, empty_blocks, group_weights
from worker_service.models.weight_memory import WeightMemory
from worker_service.tensor_group import TensorGroup

# Rows of one tile under --batch-invariant. A matrix product of exactly this many rows gives a row the same bits
# whatever the other rows hold and wherever it stands; other heights choose other kernels and orders of summation.
INVARIANT_ROWS = 64
# Rows that the packed layout is chosen for. All linears of the demo model, packed against plain, in ms on two Zen 5
# cores: bfloat16 8.0 / 11.7 at 1 row, 15.9 / 20.3 at 32, 163 / 168 at 512; float32 10 / 33, 30 / 73, 334 / 782.
_PACKED_FOR_ROWS = 32
# Rows from which matrix units (AMX) are worth a copy of the weights in oneDNN's layout beside the panels.
_MANY_ROWS = 64
_MOST_REFINED = 64  # scores of one row that are computed again


@dataclass(frozen=True, slots=True)
class Placement:
    """Where tensors live and which part of a layer this rank holds."""

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1
    batch_invariant: bool = False
    # Of this rank alone unless one is given, which joins the others before the first forward.
    group: TensorGroup = field(default_factory=lambda: TensorGroup(torch.device("cpu")))
    quantization: Quantization = field(default_factory=Quantization)
    memory: WeightMemory = field(default_factory=WeightMemory)  # for weights in their final form, on the CPU

    def share(self, size: int, what: str) -> int:
        """Return this rank's part of a dimension that is split evenly."""
        assert size % self.world_size == 0, f"{what}: {size} over {self.world_size} ranks"
        return size // self.world_size

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def part(self, target: Tensor, dim: int, *, num_parts: int = 0, full_size: int = 0) -> Slot:
        """Return the slot of this rank's part, along ``dim``, of a tensor of the checkpoint.

        Args:
            target: what is kept.
            dim: that is cut.
            num_parts: if there are fewer parts than ranks; neighbouring ranks then keep the same.
            full_size: of ``dim``, where it may not come out even.
        """
        parts = num_parts or self.world_size
        return Slot(target) if parts == 1 else Slot(target, dim, self.rank * parts // self.world_size, parts, full_size)

    def ids(self, vocab_size: int) -> range:
        """Return this rank's part of the vocabulary; parts differ by at most one."""
        return range(vocab_size * self.rank // self.world_size, vocab_size * (self.rank + 1) // self.world_size)


class Linear:
    """``y = x W^T + b`` for ``x`` [num_tokens, in_features]. Either size may be this rank's part of the model's."""

    def __init__(self, placement: Placement, in_features: int, out_features: int, *, bias: bool) -> None:
        self.weight = placement.empty(out_features, in_features)
        self.bias = placement.empty(out_features) if bias else None
        self._placement = placement
        self._panels: Tensor | None = None  # see maniple_kernels.linear
        self._packed: Tensor | None = None  # by oneDNN, where there are no panels, or for many rows
        self._added_bias = True  # by this rank
        self._blocks: dict[int, BlockRows] = {}  # first output -> what is read in blocks, until ``pack``
        self.grouped: GroupedWeights | None = None  # since ``pack``, with quantization

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, in whichever form they are kept."""
        grouped = 0 if self.grouped is None else self.grouped.num_bytes
        return grouped + sum(
            tensor.numel() * tensor.element_size()
            for tensor in (self.weight, self._panels, self._packed, self.bias)
            if tensor is not None
        )

    def _kept(self, name: str, first: int, last: int) -> Tensor:
        """Return where weights of the outputs [first, last) are read to: blocks stay blocks until ``pack``."""
        placement = self._placement
        kind = placement.quantization.blocks.get(name)
        if kind is None:
            return self.weight[first:last]
        self._blocks[first] = empty_blocks(kind, last - first, self.weight.shape[1], placement.device)
        return self._blocks[first].rows

    @property
    def fused_weights(self) -> LinearWeights | None:
        """Weights and bias as ``maniple_kernels.decoder_layer`` takes them; None if they lie in another form."""
        weights = self._panels if self.grouped is None else self.grouped
        return None if weights is None else (weights, self.bias)

    def pack(self, *, keep_weight: bool = False) -> None:
        """Reorder the weight where that helps; the plain one is let go unless somebody else needs it."""
        placement = self._placement
        if placement.quantization:
            self.grouped = group_weights(self.weight, self._blocks, placement.quantization, placement.memory)
            self.bias = None if self.bias is None else self.bias.float()
            self.weight, self._blocks = placement.empty(0, 0), {}
            return
        if fits_panels(self.weight):
            self._panels = pack_panels(self.weight, placement.memory.empty)
        wanted = self._panels is None or has_matrix_units(placement.dtype)
        if wanted and placement.device.type == "cpu" and _can_pack(placement.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_ROWS)
        if not keep_weight and (self._panels is not None or self._packed is not None):
            self.weight = placement.empty(0, 0)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, x.dtype)

    def _product(self, x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Multiply; the result is of ``dtype``, and perhaps in ``out``, where the form of the weights allows it."""
        if self.grouped is not None:
            return quantized_linear(x, self.grouped, self.bias if self._added_bias else None, dtype, out)
        if self._panels is not None and self.is_for_panels(len(x)):
            return multiply_panels(x, self._panels, self.bias if self._added_bias else None, dtype, out)
        return self._in_tiles(x) if self._placement.batch_invariant else self._multiply(x)

    def is_for_panels(self, num_rows: int) -> bool:
        """Say whether so many rows are multiplied with the panels, if there are any."""
        return self._packed is None or self._placement.batch_invariant or num_rows < _MANY_ROWS

    def _multiply(self, x: Tensor) -> Tensor:
        bias = self.bias if self._added_bias else None
        if self._packed is None:
            return functional.linear(x, self.weight, bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return y

    def _in_tiles(self, x: Tensor) -> Tensor:
        missing = -len(x) % INVARIANT_ROWS
        padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
        tiles = [self._multiply(tile) for tile in torch.split(padded, INVARIANT_ROWS)]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[: len(x)].contiguous()


def has_matrix_units(dtype: torch.dtype) -> bool:
    """Say whether this CPU multiplies matrices of this type so fast (AMX) that panels are only for few rows."""
    return dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Cut(NamedTuple):
    """How the outputs of one projection are dealt out."""

    size: int  # in the whole model
    num_parts: int  # as many as ranks, or fewer: then several ranks keep the same part


class FusedLinear(Linear):
    """Several projections of one input, their outputs side by side; each split over the ranks by columns."""

    def __init__(self, placement: Placement, in_features: int, cuts: Mapping[str, Cut], *, bias: bool) -> None:
        """Take how each part is cut; the cuts must come out even."""
        self._cuts = cuts
        super().__init__(placement, in_features, sum(size // parts for size, parts in cuts.values()), bias=bias)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return where ``<prefix><part>.weight`` and ``.bias`` of the checkpoint go."""
        result: dict[str, Slot] = {}
        start = 0
        for name, (size, num_parts) in self._cuts.items():
            end = start + size // num_parts
            weight = self._kept(f"{prefix}{name}.weight", start, end)
            result[f"{prefix}{name}.weight"] = self._placement.part(weight, 0, num_parts=num_parts)
            if self.bias is not None:
                result[f"{prefix}{name}.bias"] = self._placement.part(self.bias[start:end], 0, num_parts=num_parts)
            start = end
        return result


class RowLinear(Linear):
    """A projection whose input is split over the ranks: partial results are added up over them."""

    def __init__(self, placement: Placement, in_features: int, out_features: int, *, bias: bool) -> None:
        """Take the sizes in the whole model."""
        super().__init__(placement, placement.share(in_features, "inputs"), out_features, bias=bias)
        self._added_bias = placement.rank == 0  # once in the sum

    def slots(self, name: str) -> dict[str, Slot]:
        weight = self._kept(f"{name}.weight", 0, len(self.weight))
        result = {f"{name}.weight": self._placement.part(weight, 1)}
        if self.bias is not None:
            result[f"{name}.bias"] = Slot(self.bias)
        return result

    def __call__(self, x: Tensor) -> Tensor:
        return self._placement.group.all_reduce(super().__call__(x))


class Embedding:
    """The vectors of the vocabulary's ids, split by ids."""

    def __init__(self, placement: Placement, vocab_size: int, hidden_size: int) -> None:
        self._placement = placement
        self._vocab_size = vocab_size
        self._ids = placement.ids(vocab_size)
        self.weight = placement.empty(len(self._ids), hidden_size)
        self._blocks: dict[int, BlockRows] = {}
        self.grouped: GroupedWeights | None = None  # since ``pack``, with quantization

    def slots(self, name: str) -> dict[str, Slot]:
        placement, target = self._placement, self.weight
        if (kind := placement.quantization.blocks.get(f"{name}.weight")) is not None:
            self._blocks[0] = empty_blocks(kind, len(target), target.shape[1], placement.device)
            target = self._blocks[0].rows
        return {f"{name}.weight": placement.part(target, 0, full_size=self._vocab_size)}

    def pack(self) -> None:
        """Bring the vectors into the form they are kept in. In 8 bits at least: the scores may be made of them."""
        placement = self._placement
        if quantization := placement.quantization:
            wanted = quantization if self._blocks else Quantization("int8")
            self.grouped = group_weights(self.weight, self._blocks, wanted, placement.memory)
            self.weight, self._blocks = placement.empty(0, 0), {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors, in whichever form they are kept."""
        plain = self.weight.numel() * self.weight.element_size()
        return plain if self.grouped is None else self.grouped.num_bytes

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size] of the type of the activations."""
        if self._placement.world_size == 1:
            return self._vectors(input_ids)
        within = input_ids - self._ids.start
        foreign = (within < 0) | (within >= len(self._ids))
        vectors = self._vectors(within.masked_fill_(foreign, 0))
        vectors.masked_fill_(foreign[:, None], 0)
        return self._placement.group.all_reduce(vectors)  # exact: all but one are zeros

    def _vectors(self, ids: Tensor) -> Tensor:
        if self.grouped is not None:
            return dequantize(self.grouped, ids).to(self._placement.dtype)
        return functional.embedding(ids, self.weight)


class VocabLinear(Linear):
    """The projection to scores of the vocabulary, split by ids; its weight may be the embedding's."""

    def __init__(self, placement: Placement, hidden_size: int, vocab_size: int, *, tied_to: Embedding | None) -> None:
        self._vocab_size = vocab_size
        self._num_ids = len(placement.ids(vocab_size))
        super().__init__(placement, hidden_size, self._num_ids if tied_to is None else 0, bias=False)
        self._tied_to = tied_to
        self._room = torch.empty(0)  # on the host, of scores
        if tied_to is not None:
            self.weight = tied_to.weight

    def slots(self, name: str) -> dict[str, Slot]:
        if self._tied_to is not None:
            return {}
        weight = self._kept(f"{name}.weight", 0, self._num_ids)
        return {f"{name}.weight": self._placement.part(weight, 0, full_size=self._vocab_size)}

    def pack(self, *, keep_weight: bool = True) -> None:
        """As of every linear; of 8 bits at least. A tied embedding is packed before."""
        placement = self._placement
        if not placement.quantization:
            super().pack(keep_weight=keep_weight)
        elif self._tied_to is not None:
            self.grouped, self.weight = self._tied_to.grouped, self._tied_to.weight
        else:
            wanted = placement.quantization if self._blocks else Quantization("int8")
            self.grouped = group_weights(self.weight, self._blocks, wanted, placement.memory)
            self.weight, self._blocks = placement.empty(0, 0), {}

    @property
    def num_bytes(self) -> int:
        """Bytes of what is not the embedding's."""
        return super().num_bytes - (0 if self._tied_to is None else self._tied_to.num_bytes)

    def scores(self, x: Tensor) -> Tensor | None:
        """Return [num_rows, vocab_size] float32 scores on rank 0, which samples; None on the others.

        Valid until it is called again.
        """
        scores = self._own_scores(x)
        placement = self._placement
        if placement.world_size == 1:
            return scores
        # Parts of one size travel; where the vocabulary does not come out even the shorter are filled up.
        longest = -(-self._vocab_size // placement.world_size)
        gathered = placement.group.gather(functional.pad(scores, (0, longest - self._num_ids)))
        if gathered is None:
            return None
        ids = [replace(placement, rank=rank).ids(self._vocab_size) for rank in range(placement.world_size)]
        return torch.cat([part[:, : len(own)] for part, own in zip(gathered, ids, strict=True)], dim=1)

    def _own_scores(self, x: Tensor) -> Tensor:
        """Return [num_rows, ids of this rank] float32 scores; where they are rounded first the highest are made exact.

        Panels give float32. Else a product rounded to bfloat16 has steps of 0.125 at a score of 25, so that 7 % of all
        positions end in a tie at the top, which the lowest id would win. What lies within a step of the highest is
        computed again in float32.
        """
        if x.is_cuda and x.dtype is not torch.float32:
            # Not rounded at all; to look for ties would make the host wait.
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return exact_at_top(self._product(x, torch.float32, self._room_for(len(x))), x, self.weight)

    def _room_for(self, num_rows: int) -> Tensor | None:
        """Return where scores go: 6 MB for 32 rows, which would come and go, and leave holes, in every step."""
        if self._placement.device.type != "cpu" or (self._panels is None and self.grouped is None):
            return None
        size = num_rows * self._num_ids
        if len(self._room) < size:
            self._room = torch.empty(0)  # the old goes before the new comes
            self._room = torch.empty(size)
        return self._room[:size].view(num_rows, self._num_ids)


def exact_at_top(scores: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return scores ``x W^T`` as float32; where they were rounded, what lies near the highest is computed again."""
    if scores.dtype is torch.float32:
        return scores
    step = torch.finfo(scores.dtype).eps
    scores = scores.float()
    top = scores.amax(dim=-1, keepdim=True)
    near = scores >= top - step * top.abs()
    near &= near.sum(dim=-1, keepdim=True) <= _MOST_REFINED  # a flat row has nothing to decide
    rows, ids = near.nonzero(as_tuple=True)
    scores[rows, ids] = (x[rows].float() * weight[ids].float()).sum(dim=-1)
    return scores
