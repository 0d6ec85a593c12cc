"""Where the arrays of a step lie for the model: on the host as they are, or on a device, each at its own place."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker_service.attention.base import StepTensors
from worker_service.forward.staged_array import StagedArray
from worker_service.input_batch import StepInput


class StepArrays(Protocol):
    """Where the arrays of a step lie for the model."""

    def place(self, step: StepInput, num_rows: int | None = None) -> StepTensors:
        """Bring a step to the device, filled up to so many rows; only a step of single queries can be."""

    def follow(self, latest: Tensor) -> bool:
        """Take ids that the host does not know from ``latest``, by req_index; False: all ids come from the host."""


class HostStepArrays:
    """On the CPU the arrays of the batch are what the model reads."""

    def place(self, step: StepInput, num_rows: int | None = None) -> StepTensors:
        assert num_rows is None, "nothing is filled up where nothing is recorded"
        return StepTensors(
            input_ids=torch.from_numpy(step.input_ids),
            positions=torch.from_numpy(step.positions),
            slots=torch.from_numpy(step.slot_mapping),
            query_start_loc=torch.from_numpy(step.query_start_loc),
            seq_lens=torch.from_numpy(step.seq_lens),
            block_tables=torch.from_numpy(step.block_tables),
        )

    def follow(self, latest: Tensor) -> bool:
        return False


class DeviceStepArrays:
    """On a device they are copied, each to its place."""

    def __init__(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_num_blocks: int, device: torch.device
    ) -> None:
        """Take the limits of a step, and the most blocks that one row may have."""
        self._input_ids = StagedArray((max_num_batched_tokens,), torch.int32, device)
        self._positions = StagedArray((max_num_batched_tokens,), torch.int64, device)
        self._slots = StagedArray((max_num_batched_tokens,), torch.int64, device)
        self._query_start_loc = StagedArray((max_num_seqs + 1,), torch.int32, device)
        self._seq_lens = StagedArray((max_num_seqs,), torch.int32, device)
        self._block_tables = StagedArray((max_num_seqs, max_num_blocks), torch.int32, device)
        self._pending = StagedArray((2 * max_num_seqs,), torch.int64, device)
        self._latest: Tensor | None = None

    def follow(self, latest: Tensor) -> bool:
        self._latest = latest
        return True

    def place(self, step: StepInput, num_rows: int | None = None) -> StepTensors:
        num_reqs = len(step.seq_lens)
        padding = 0 if num_rows is None else num_rows - num_reqs
        assert padding >= 0
        starts = step.query_start_loc
        if padding:
            assert len(step.input_ids) == num_reqs, "only single queries are filled up"
            starts = np.arange(num_reqs + padding + 1, dtype=np.int32)
        # Zeros behind: token 0 at position 0 writes to slot 0, in the null block, and sees no keys.
        input_ids = self._input_ids.put(step.input_ids, num_padding=padding)
        if step.pending_places is not None and step.pending_rows is not None and len(step.pending_rows):
            assert self._latest is not None, "nobody said where sampled tokens lie"
            both = self._pending.put(np.concatenate((step.pending_places, step.pending_rows)))
            places, rows = both.view(2, -1)
            input_ids.index_copy_(0, places, self._latest.index_select(0, rows))
        return StepTensors(
            input_ids=input_ids,
            positions=self._positions.put(step.positions, num_padding=padding),
            slots=self._slots.put(step.slot_mapping, num_padding=padding),
            query_start_loc=self._query_start_loc.put(starts),
            seq_lens=self._seq_lens.put(step.seq_lens, num_padding=padding),
            block_tables=self._block_tables.put(step.block_tables, num_padding=padding),
        )
