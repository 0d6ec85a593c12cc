"""Bring the tokens of one step to the device and through the model's layers, kernel by kernel or by a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from worker_service.attention.base import AttentionBackend
from worker_service.forward.graph_runner import GraphRunner
from worker_service.forward.step_arrays import StepArrays
from worker_service.input_batch import StepInput
from worker_service.kv_cache import KvCache
from worker_service.models.registry import Forward


class ForwardPass:
    """One model's forward over its cache. Device thread."""

    def __init__(
        self, forward: Forward, attention: AttentionBackend, arrays: StepArrays, graphs: GraphRunner | None
    ) -> None:
        self.attention = attention
        self.graphs = graphs  # None: this device has none
        self._forward = forward
        self._arrays = arrays

    def __call__(self, step: StepInput, kv: KvCache) -> Tensor:
        """Return the hidden states of the step's tokens, [num_tokens, hidden_size]; valid until the next step.

        Those that the step does not want may be anything.
        """
        if self.graphs is not None:
            size = self.graphs.sizes.dispatch(len(step.seq_lens), len(step.input_ids)).size
            if size is not None:
                return self.graphs.replay(size, step)
        return self.eager(step, kv)

    def follow(self, latest: Tensor) -> bool:
        """Take input ids that the host does not know from there, [max_num_seqs] int32; False if it cannot be."""
        return self._arrays.follow(latest)

    def eager(self, step: StepInput, kv: KvCache) -> Tensor:
        """As a call, whatever graphs there are."""
        tensors = self._arrays.place(step)
        attention = self.attention.begin(step, tensors)
        return self._forward(tensors.input_ids, tensors.positions, tensors.slots, kv.layers, attention)


def dummy_step(counts: Sequence[int], block_size: int) -> StepInput:
    """Return a step of fresh requests with so many tokens each, all in the null block; the last of each is wanted."""
    num_tokens = sum(counts)
    ends = np.cumsum(counts)
    return StepInput(
        input_ids=np.zeros(num_tokens, np.int32),
        positions=np.concatenate([np.arange(count) for count in counts]),
        slot_mapping=np.zeros(num_tokens, np.int64),
        query_start_loc=np.append(0, ends).astype(np.int32),
        seq_lens=np.array(counts, np.int32),
        block_tables=np.zeros((len(counts), -(-max(counts) // block_size)), np.int32),
        wanted=ends - 1 if num_tokens > len(counts) else None,
    )
