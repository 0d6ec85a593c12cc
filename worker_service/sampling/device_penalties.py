"""Keep on the device what penalties need of the tokens of each row that has some."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from maniple_kernels.gpu.penalties import penalize_
from worker_service.forward.device_copies import to_device
from worker_service.sampling.columns import SamplingColumns
from worker_service.sampling.sampler import KnownTokens
from worker_service.step_work import Int32Array


class DevicePenalties:
    """Which ids a row has seen, and how often each is in its output. Device thread.

    Rows of two tables, given to rows of the batch as they come: five bytes for each id of the vocabulary, taken only
    when somebody asks for a penalty.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._seen = torch.zeros((0, vocab_size), dtype=torch.uint8, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._slots: dict[int, tuple[object, int]] = {}  # req_index -> whose, slot
        self._num_counted: dict[int, int] = {}  # slot -> tokens

    def warm_up(self, logits: Tensor) -> None:
        """Launch the kernel once, for nobody."""
        if not self._free:
            self._grow()
        nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
        factors = torch.tensor([[1.0], [0.0], [0.0]], device=self._device)
        penalize_(logits, nothing, nothing + self._free[-1], self._seen, self._counts, *factors)

    def apply_(
        self, logits: Tensor, columns: SamplingColumns, asking: list[tuple[int, int]], tokens: KnownTokens
    ) -> None:
        """Penalize the rows that ask for it.

        Args:
            logits: [num_rows, vocab_size] float32, changed in place.
            columns: what they ask for.
            asking: (place in ``logits``, req_index).
            tokens: known ones.
        """
        self._drop_gone(columns)
        rows = [row for _, row in asking]
        slots = np.array([self._slot(row, columns) for row in rows], np.int32)
        self._count(rows, slots, tokens)
        factors = np.stack(
            [columns.repetition_penalty[rows], columns.frequency_penalty[rows], columns.presence_penalty[rows]]
        )
        places = np.array([place for place, _ in asking], np.int32)
        penalize_(
            logits,
            to_device(places, self._device),
            to_device(slots, self._device),
            self._seen,
            self._counts,
            *to_device(factors, self._device),
        )

    def follow(self, logits_rows: list[tuple[int, int]], sampled: Tensor) -> None:
        """Count what was sampled, which the host may not know yet.

        Args:
            logits_rows: (place, req_index) of rows with penalties.
            sampled: [num_rows] ids, on the device.
        """
        places = to_device(np.array([place for place, _ in logits_rows], np.int64), self._device)
        slots = np.array([self._slots[row][1] for _, row in logits_rows], np.int64)
        for slot in slots.tolist():
            self._num_counted[slot] += 1
        on_device, ids = to_device(slots, self._device), sampled[places].long()
        self._seen[on_device, ids] = 1
        self._counts[on_device, ids] += 1  # slots are distinct

    def _drop_gone(self, columns: SamplingColumns) -> None:
        for row, (whose, slot) in list(self._slots.items()):
            if columns.penalties.get(row) is not whose:
                del self._slots[row]
                self._free.append(slot)

    def _slot(self, row: int, columns: SamplingColumns) -> int:
        if row in self._slots:
            return self._slots[row][1]
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[row] = (columns.penalties[row], slot)
        self._forget(slot)
        return slot

    def _grow(self) -> None:
        present = len(self._seen)
        more = max(4, present)
        self._seen = torch.cat([self._seen, self._seen.new_zeros((more, self._vocab_size))])
        self._counts = torch.cat([self._counts, self._counts.new_zeros((more, self._vocab_size))])
        self._free += range(present, present + more)

    def _forget(self, slot: int) -> None:
        self._seen[slot] = 0
        self._counts[slot] = 0
        self._num_counted[slot] = 0

    def _count(self, rows: list[int], slots: Int32Array, tokens: KnownTokens) -> None:
        """Take in the tokens that came since a row was last looked at: its prompt, or what it did not sample here."""
        new_slots, new_ids, output_slots, output_ids = [], [], [], []
        for row, slot in zip(rows, slots.tolist(), strict=True):
            known = int(tokens.num_tokens[row])
            if self._num_counted[slot] > known:  # what was counted last was not kept
                self._forget(slot)
            start = self._num_counted[slot]
            if start == known:
                continue
            first_output = max(start, int(tokens.num_prompt_tokens[row]))
            ids = tokens.token_ids[row, start:known]
            output = tokens.token_ids[row, first_output:known]
            new_slots.append(np.full(len(ids), slot))
            new_ids.append(ids)
            output_slots.append(np.full(len(output), slot))
            output_ids.append(output)
            self._num_counted[slot] = known
        if not new_ids:
            return
        places = [to_device(np.concatenate(part).astype(np.int64), self._device) for part in (new_slots, new_ids)]
        self._seen[places[0], places[1]] = 1
        places = [to_device(np.concatenate(part).astype(np.int64), self._device) for part in (output_slots, output_ids)]
        ones = torch.ones(len(places[0]), dtype=torch.int32, device=self._device)
        self._counts.index_put_((places[0], places[1]), ones, accumulate=True)
