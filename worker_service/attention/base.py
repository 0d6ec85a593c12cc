"""What the layers of a model and the runner need of whatever computes attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from maniple_kernels.kv_store import store_kv
from worker_service.input_batch import StepInput

KvLayer = tuple[Tensor, Tensor]
"""Keys [num_blocks, num_kv_heads, head_dim, block_size] and values [num_blocks, num_kv_heads, block_size, head_dim].
Strides are those of the backend's layout."""


class KvLayout(Enum):
    """How the keys of one block and head lie in memory; values always have the head dimension innermost."""

    SLOTS_INNERMOST = "slots"  # scores of a block are one vector: what the CPU's kernels walk
    DIMS_INNERMOST = "dims"  # keys as values: what matrix units load


class Graphs(Enum):
    """How far a step of single queries can be recorded and replayed."""

    WHOLE = "whole"  # attention reads all that changes from the step's persistent tensors
    PIECEWISE = "piecewise"  # attention computes on the host or launches by it: it runs between the pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What attention is for: this rank's heads, and the limits of a step."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The arrays of one step on the device. Padding rows have one token, which writes to the null block, and no keys.

    They lie at the same addresses in every step of the same size; valid until the next step.
    """

    input_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64
    query_start_loc: Tensor  # [num_reqs + 1] int32
    seq_lens: Tensor  # [num_reqs] int32, the tokens of this step included; 0 for padding
    block_tables: Tensor  # [num_reqs, max_num_blocks] int32


class StepAttention(Protocol):
    """Attention for the tokens of one step; the same for all layers. Valid until the next step."""

    def store(self, keys: Tensor, values: Tensor, slots: Tensor, kv: KvLayer) -> None:
        """Write the keys and values of the step's tokens into a layer's cache, before its ``attend``.

        Args:
            keys: [num_tokens, num_kv_heads, head_dim].
            values: as keys.
            slots: [num_tokens] int64, where each goes.
            kv: the layer's cache.
        """
        store_kv(keys, values, slots, *kv)

    def attend(
        self,
        query: Tensor,
        kv: KvLayer,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend for all tokens of the step; their own keys and values are in the cache already.

        Args:
            query: [num_tokens, num_heads, head_dim]; heads of one token lie together, tokens may lie apart.
            kv: the layer's cache.
            scale: factor of the scores.
            window: keys that a token sees, itself included; 0: all.
            soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: as they are.
            out: where the result goes, contiguous; None: a new tensor.
        Returns:
            [num_tokens, num_heads, head_dim].
        """


@runtime_checkable
class Tunable(Protocol):
    """What can measure, on its device, how its kernels are launched best."""

    def tune(self) -> None:
        """Do so, or take what was measured before. At warm-up, before anything is recorded."""


class AttentionBackend(Protocol):
    """One way to compute attention, made for one model. Device thread."""

    name: str
    layout: KvLayout
    graphs: Graphs

    def begin(self, step: StepInput, tensors: StepTensors) -> StepAttention:
        """Prepare a step.

        Args:
            step: its arrays on the host, without padding.
            tensors: the same on the device, perhaps with padding rows behind; where ``graphs`` is WHOLE, what is
                returned for a step of single queries must read nothing else that changes from step to step.
        """
