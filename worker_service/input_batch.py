"""Hold the batch on the host: rows that stay put, and the flat arrays of one step.

Numpy only, so that a model without torch or without a KV cache can use it. Index spaces: ``req_index`` names a row of
every table; ``rows`` lists those that compute in a step, and everything flat follows its order.

    rows             r0        r1   r2
    input_ids       |a b c d | e  | f g|      [num_tokens]
    query_start_loc  0         4    5    7    [num_reqs + 1]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service_chassis.protocol.arrays import mix_array
from service_chassis.protocol.digest import row_factor
from worker_service.sampling.columns import SamplingColumns
from worker_service.step_work import NewRow, StepWork, TableChange, TableOp

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StepInput:
    """The flat arrays of one step: views of the batch's buffers, valid until the next step."""

    input_ids: Int32Array  # [num_tokens]
    positions: Int64Array  # [num_tokens]
    slot_mapping: Int64Array  # [num_tokens]
    query_start_loc: Int32Array  # [num_reqs + 1]
    seq_lens: Int32Array  # [num_reqs], the tokens of this step included
    block_tables: Int32Array  # [num_reqs, max_num_blocks of these rows]
    # Where ``input_ids`` holds nothing yet, and the rows whose last sampled token belongs there: it is on the device.
    pending_places: Int64Array | None = None  # [num_pending]; None: all ids are there
    pending_rows: Int64Array | None = None  # [num_pending]
    # Tokens whose hidden states are looked at, in order; None: all. Those of others may be anything.
    wanted: Int64Array | None = None  # [num_wanted]


@dataclass(slots=True)
class PendingTokens:
    """One token of each of some rows, sampled in one step, whose ids the host does not know yet."""

    rows: Int32Array  # [num_rows]
    positions: Int32Array  # [num_rows], of the tokens in their rows
    factors: npt.NDArray[np.uint64]  # [num_rows], of the digests: another one now is another request
    digest: int  # over the tokens that count after the step, without these until they are known


class InputBatch:
    """The rows of one rank. Used by the device thread alone."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, block_size: int, vocab_size: int
    ) -> None:
        self.block_size = block_size
        self.sampling = SamplingColumns(max_num_seqs, vocab_size)
        # Rows of zeros cost no memory before they are written.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)  # known: given and sampled
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.live: set[int] = set()
        self._factor = np.zeros(max_num_seqs, np.uint64)  # c of the digests
        self._row_digest = np.zeros(max_num_seqs, np.uint64)  # sum over the row's known tokens
        self._digest = 0  # sum over live rows
        self._pending: list[PendingTokens] = []  # in step order
        self._pending_position = np.full(max_num_seqs, -1, np.int32)  # of the row's last token, where it is not known
        self._input_ids = np.zeros(max_num_batched_tokens, np.int32)
        self._positions = np.zeros(max_num_batched_tokens, np.int64)
        self._slot_mapping = np.zeros(max_num_batched_tokens, np.int64)
        self._query_start_loc = np.zeros(max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)

    @property
    def token_digest(self) -> int:
        """The digest of all known tokens of all live rows (PROTOCOL B7)."""
        return self._digest & _MASK64

    def apply(self, work: StepWork) -> None:
        """Apply what a delta says of rows and tables, in its order. Block contents are somebody else's."""
        for finished in work.finished:
            self._remove(finished.req_index)
        for req_index in work.preempted:
            self._clear_table(req_index, 0)
        for new in work.new_rows:
            self._add(new)
        for change in work.table_changes:
            self._change_table(change)

    def _add(self, new: NewRow) -> None:
        row = new.req_index
        if new.fork_of is None:
            tokens: Int32Array = new.token_ids
        else:
            tokens = self.token_ids[new.fork_of, : new.num_prefill_tokens]
        count = len(tokens)
        self.live.add(row)
        self.token_ids[row, :count] = tokens
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self._clear_table(row, 0)
        self._factor[row] = row_factor(new.row_key)
        terms = self._token_terms(np.full(count, self._factor[row]), np.arange(count), self.token_ids[row, :count])
        self._row_digest[row] = terms.sum(dtype=np.uint64)
        self._digest += int(self._row_digest[row])
        self.sampling.add(row, new.sampling, new.sample_index, fork_of=new.fork_of)

    def _remove(self, row: int) -> None:
        self.live.discard(row)
        self._digest -= int(self._row_digest[row])
        self._row_digest[row] = 0
        self._factor[row] = 0
        self._pending_position[row] = -1
        self.num_tokens[row] = 0
        self._clear_table(row, 0)
        self.sampling.remove(row)

    def _clear_table(self, row: int, num_kept: int) -> None:
        # Entries past the end are the null block: padded tables never name a block of another row.
        self.block_tables[row, num_kept : self.num_blocks[row]] = 0
        self.num_blocks[row] = num_kept

    def _change_table(self, change: TableChange) -> None:
        row, block_ids = change.req_index, change.block_ids
        if change.op is TableOp.DROP_LEADING:
            self.block_tables[row, : change.value] = 0
            return
        if change.op is TableOp.REPLACE:
            self._clear_table(row, 0)
        elif change.op is not TableOp.APPEND:
            raise AssertionError(f"{change.op} for a model without state slots")
        start = int(self.num_blocks[row])
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def prepare(self, work: StepWork) -> StepInput:
        """Lay the tokens of a step out flat."""
        counts, computed = work.num_scheduled_tokens, work.num_computed_tokens
        num_reqs = len(counts)
        num_tokens = int(counts.sum())
        starts = self._query_start_loc[: num_reqs + 1]
        np.cumsum(counts, out=starts[1:])
        seq_lens = np.add(computed, counts, out=self._seq_lens[:num_reqs])
        positions = self._positions[:num_tokens]
        if num_tokens == num_reqs:  # nothing but decodes
            row_of_token = work.rows
            positions[:] = computed
        else:
            row_of_token = np.repeat(work.rows, counts)
            positions[:] = np.repeat(computed - starts[:-1], counts)
            positions += np.arange(num_tokens)
        input_ids = self._input_ids[:num_tokens]
        input_ids[:] = self.token_ids[row_of_token, positions]
        slots = self._slot_mapping[:num_tokens]
        slots[:] = self.block_tables[row_of_token, positions // self.block_size]
        slots *= self.block_size
        slots += positions % self.block_size
        widest = int(self.num_blocks[work.rows].max(initial=0))
        tables = self.block_tables[work.rows, :widest]
        if not self._pending:
            return StepInput(input_ids, positions, slots, starts, seq_lens, tables)
        (waiting,) = np.nonzero(self._pending_position[work.rows] == seq_lens - 1)
        pending_places, pending_rows = starts[1:][waiting].astype(np.int64) - 1, work.rows[waiting].astype(np.int64)
        return StepInput(input_ids, positions, slots, starts, seq_lens, tables, pending_places, pending_rows)

    def append(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Add one sampled token to each row."""
        positions = self.num_tokens[rows]
        self.token_ids[rows, positions] = token_ids
        self.num_tokens[rows] += 1
        terms = self._token_terms(self._factor[rows], positions, token_ids)
        self._row_digest[rows] += terms
        self._digest += int(terms.sum(dtype=np.uint64))

    def expect(self, rows: Int32Array) -> PendingTokens:
        """Count one sampled token of each row whose id comes later. Rows may leave before it does.

        At most one later step is applied before ``settle``: of rows that are there then, what became of them in it is
        what became of them after this step.
        """
        positions = self.num_tokens[rows]
        pending = PendingTokens(rows, positions, self._factor[rows], self._digest)
        self.num_tokens[rows] += 1
        self._pending_position[rows] = positions
        self._pending.append(pending)
        return pending

    def settle(self, pending: PendingTokens, token_ids: Int32Array) -> int:
        """Fill in the tokens of the oldest step that has some to come; return the token digest after that step.

        Rows that have left meanwhile are left alone; they count in the digest, since they were there.
        """
        assert self._pending[0] is pending
        del self._pending[0]
        rows, positions = pending.rows, pending.positions
        terms = self._token_terms(pending.factors, positions, token_ids)
        there = self._factor[rows] == pending.factors
        digest = (pending.digest + int(terms.sum(dtype=np.uint64))) & _MASK64
        rows, positions, terms = rows[there], positions[there], terms[there]
        self.token_ids[rows, positions] = token_ids[there]
        self._row_digest[rows] += terms
        added = int(terms.sum(dtype=np.uint64))
        self._digest += added
        for later in self._pending:
            later.digest += added
        done = self._pending_position[rows] == positions  # else a later token of the row is to come
        self._pending_position[rows[done]] = -1
        return digest

    @staticmethod
    def _token_terms(
        factors: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer], token_ids: Int32Array
    ) -> npt.NDArray[np.uint64]:
        """Return each token's contribution to the digest, as ``protocol.digest.token_term``."""
        place = positions.astype(np.uint64) << np.uint64(32) | token_ids.astype(np.uint64)
        return mix_array(factors ^ mix_array(place))

    def known_tokens(self, req_index: int) -> list[int]:
        """Return all known tokens of a live row."""
        known: list[int] = self.token_ids[req_index, : self.num_tokens[req_index]].tolist()
        return known

    def reset(self) -> None:
        """Forget all rows."""
        self._pending.clear()
        for row in list(self.live):
            self._remove(row)
        assert self.token_digest == 0
        self.sampling.clear()
