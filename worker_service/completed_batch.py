"""Keep the batch as it is after the last completed step: all that a later owner has to be told (PROTOCOL B8, B9, C5).

``batch_state`` is ahead, at the last accepted delta, and knows no tokens; the runner has them, and may hang in a
collective for good. So the event loop keeps its own copy, written from what completed steps return: a snapshot never
asks the device, and is possible when the device never answers again.

A steady step costs a few vector operations, whatever the context; the rest is in proportion to what changes.
Pure: time comes as an argument. Used by the event loop alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maniple.v1.scheduler_delta_pb2 import NewRequest, RowFinished
from service_chassis.protocol.logprobs import Logprobs
from worker_service.batch_rows import BatchLimits, RowState
from worker_service.block_hashes import BlockHashes
from worker_service.step_work import (
    NOT_SAMPLED,
    FinishedRow,
    Int32Array,
    Mode,
    NewRow,
    RowLogprobs,
    StepWork,
    TableChange,
    TableOp,
    places_of_tokens,
)
from worker_service.tombstones import Tombstone, Tombstones


@dataclass(slots=True)
class _Row:
    request: NewRequest  # as it entered, less tokens and tables
    entered_at: float  # monotonic
    tables: list[list[int]]  # KV group -> block ids
    state_slots: dict[int, int]
    logprobs: Logprobs | None  # of its output, a position a token; None: not asked for
    prompt_logprobs: Logprobs | None  # from the second token on; forks share it with their parent


@dataclass(frozen=True, slots=True)
class FrozenRow:
    """A row at one moment. Nothing of it changes later."""

    req_index: int
    request: NewRequest  # as it entered, less tokens and tables; shared, not to be written
    state: RowState
    token_ids: Int32Array  # all known
    num_computed_tokens: int
    num_prefill_tokens: int
    tables: tuple[tuple[int, ...], ...]
    state_slots: tuple[tuple[int, int], ...]
    age_s: float  # since it entered
    is_void: bool  # its mask died: what it computed beyond its known tokens is padding
    logprobs: Logprobs | None = None  # of its output, a position a token
    prompt_logprobs: Logprobs | None = None  # from the second token on; None also where a row before it has them


@dataclass(frozen=True, slots=True)
class FrozenBatch:
    """A batch at one moment."""

    step: int
    state_digest: int
    token_digest: int
    rows: tuple[FrozenRow, ...]  # ascending by req_index
    block_hashes: tuple[tuple[tuple[int, bytes], ...], ...]  # KV group -> (free block, hash), evicted first comes first


class CompletedBatch:
    """Rows with their tokens, and what is left of rows that went."""

    def __init__(self, limits: BatchLimits, tombstones: Tombstones) -> None:
        """Start with an empty batch before step 1. Rows that leave are buried in ``tombstones``."""
        self.step = 0
        self.state_digest = 0
        self.token_digest = 0
        self._limits = limits
        self._tombstones = tombstones
        self._rows: dict[int, _Row] = {}
        self._entering: deque[tuple[int, float, list[NewRequest]]] = deque()  # accepted, not completed: step, when
        self._hashes = BlockHashes(limits.block_size)
        # By req_index. Rows of zeros cost no memory before they are written.
        self._token_ids: Int32Array = np.zeros((limits.max_num_seqs, limits.max_model_len), np.int32)
        self._num_known: Int32Array = np.zeros(limits.max_num_seqs, np.int32)
        self._num_written: Int32Array = np.zeros(limits.max_num_seqs, np.int32)  # known by any row that left its place
        self._num_computed: Int32Array = np.zeros(limits.max_num_seqs, np.int32)
        self._num_prefill: Int32Array = np.zeros(limits.max_num_seqs, np.int32)
        self._decodes: npt.NDArray[np.bool_] = np.zeros(limits.max_num_seqs, np.bool_)
        self._preempted: npt.NDArray[np.bool_] = np.zeros(limits.max_num_seqs, np.bool_)
        self._void: npt.NDArray[np.bool_] = np.zeros(limits.max_num_seqs, np.bool_)
        # Of `_num_computed`, which is what deltas say, tokens that were tried ahead in vain.
        self._num_rejected: Int32Array = np.zeros(limits.max_num_seqs, np.int32)

    def known_tokens(self, req_index: int) -> Int32Array:
        """Return all known tokens of a live row: a view, valid until the next step."""
        return self._token_ids[req_index, : self._num_known[req_index]]

    def row_key(self, req_index: int) -> int:
        """Return what tells a live row from others that had its place."""
        return self._rows[req_index].request.row_key

    def accept(self, step: int, entering: Iterable[NewRequest], now: float) -> None:
        """Note what an accepted delta says of rows that enter, until its step is completed."""
        requests = [_without_bulk(request) for request in entering]
        if requests:
            self._entering.append((step, now, requests))

    def complete(
        self,
        work: StepWork,
        token_ids: Int32Array,
        token_digest: int,
        now: float,
        logprobs: Iterable[RowLogprobs] = (),
        num_tokens: Int32Array | None = None,
    ) -> None:
        """Take over a step that was done.

        Args:
            work: the step, in order.
            token_ids: what the rows that sampled got, in the order of ``work.rows``.
            token_digest: of the rank's known tokens after it.
            now: monotonic.
            logprobs: what it told of tokens.
            num_tokens: of ``token_ids``, for each of those rows; None: one each.
        """
        for finished in work.finished:
            self._finish(finished, now)
        for req_index in work.preempted:
            self._let_blocks_go(req_index)
            self._rows[req_index].tables = self._no_tables()
            self._rows[req_index].state_slots.clear()
            self._num_computed[req_index] = self._num_rejected[req_index] = 0
            self._decodes[req_index], self._preempted[req_index] = False, True
        if work.forget_prefix_cache:
            self._hashes.forget()
        if work.new_rows:
            step, entered_at, requests = self._entering.popleft()
            assert step == work.step, "what enters was accepted with its delta"
            for new, request in zip(work.new_rows, requests, strict=True):
                self._enter(new, _Row(request, entered_at, self._no_tables(), {}, *self._no_logprobs(new)))
        for resumed in work.resumed:
            req_index = resumed.req_index
            self._preempted[req_index] = False
            self._num_computed[req_index] = resumed.num_computed_tokens
            self._num_prefill[req_index] = resumed.num_prefill_tokens
            self._void[req_index] &= resumed.num_prefill_tokens != self._num_known[req_index]
        for change in work.table_changes:
            self._change_table(change)
        if work.mode is Mode.RUN:
            self._compute(work, token_ids, num_tokens)
            self._keep(logprobs)
        self.step, self.state_digest, self.token_digest = work.step, work.state_digest, token_digest

    def _compute(self, work: StepWork, token_ids: Int32Array, num_tokens: Int32Array | None) -> None:
        ends = work.num_computed_tokens + work.num_scheduled_tokens
        self._num_computed[work.rows] = ends
        rows, positions = work.rows[work.samples], ends[work.samples]
        self._decodes[rows] = True
        if work.speculation is not None:
            self._num_rejected[work.rows] = 0
            rows, positions = places_of_tokens(work, num_tokens)
        if len(void := rows[token_ids == NOT_SAMPLED]):
            self._void[void] = True
            given = token_ids != NOT_SAMPLED
            rows, positions, token_ids = rows[given], positions[given], token_ids[given]
        self._token_ids[rows, positions] = token_ids
        self._num_known[rows] = positions + 1  # of a row with several tokens the last counts
        if work.speculation is not None:
            tried = list(work.speculation.rows)
            self._num_rejected[tried] = self._num_computed[tried] + 1 - self._num_known[tried]

    def _keep(self, logprobs: Iterable[RowLogprobs]) -> None:
        for told in logprobs:
            row = self._rows[told.req_index]
            if told.sampled is not None and row.logprobs is not None:
                row.logprobs.extend(told.sampled)
            if told.prompt is not None and row.prompt_logprobs is not None:
                assert told.first_position == 1 + len(row.prompt_logprobs), "a prompt is told from its head on"
                row.prompt_logprobs.extend(told.prompt)

    def _no_logprobs(self, new: NewRow) -> tuple[Logprobs | None, Logprobs | None]:
        """Return where a row that enters keeps those of its output and of its prompt."""
        asked = new.sampling
        output = prompt = None
        if asked.num_logprobs is not None:
            # Of output that was computed elsewhere nothing is known here.
            num_unknown = new.num_prefill_tokens - new.num_prompt_tokens
            output = Logprobs(asked.num_logprobs + 1, num_unknown=num_unknown)
        if asked.num_prompt_logprobs is not None:
            parent = self._rows[new.fork_of] if new.fork_of is not None else None
            prompt = Logprobs(asked.num_prompt_logprobs + 1) if parent is None else parent.prompt_logprobs
        return output, prompt

    def _no_tables(self) -> list[list[int]]:
        return [[] for _ in range(self._limits.num_kv_groups)]

    def _enter(self, new: NewRow, row: _Row) -> None:
        req_index, num_known = new.req_index, new.num_prefill_tokens
        known = new.token_ids if new.fork_of is None else self._token_ids[new.fork_of, :num_known]
        self._rows[req_index] = row
        self._token_ids[req_index, :num_known] = known
        self._num_known[req_index] = self._num_prefill[req_index] = num_known
        self._num_computed[req_index] = new.num_computed_tokens
        self._decodes[req_index] = self._preempted[req_index] = self._void[req_index] = False
        self._num_rejected[req_index] = 0

    def _finish(self, finished: FinishedRow, now: float) -> None:
        self._let_blocks_go(finished.req_index)
        row = self._rows.pop(finished.req_index)
        request = row.request
        tombstone = Tombstone(
            request_id=request.request_id,
            sample_index=request.sample_index,
            token_ids=self.known_tokens(finished.req_index)[: finished.num_tokens].tolist(),
            num_prompt_tokens=request.num_prompt_tokens,
            reason=RowFinished.Reason.ValueType(finished.reason),
            control_blob=request.control_blob,
        )
        is_shared = any(other.prompt_logprobs is row.prompt_logprobs for other in self._rows.values())
        prompt = None if row.prompt_logprobs is None or is_shared else row.prompt_logprobs
        output = None
        if row.logprobs is not None:
            output = row.logprobs.part(0, max(0, finished.num_tokens - request.num_prompt_tokens))
        self._tombstones.add(now, tombstone, output, prompt)
        written, known = self._num_written[finished.req_index], self._num_known[finished.req_index]
        self._num_written[finished.req_index] = max(written, known)

    def _let_blocks_go(self, req_index: int) -> None:
        row = self._rows[req_index]
        # Of a void row more is computed than known, and that is padding.
        num_cached = min(self._num_computed[req_index] - self._num_rejected[req_index], self._num_known[req_index])
        cached = self._token_ids[req_index, :num_cached]
        for group, table in enumerate(row.tables):
            if group not in row.state_slots:
                self._hashes.keep(group, table, cached, row.request.cache_namespace)

    def _change_table(self, change: TableChange) -> None:
        row, group = self._rows[change.req_index], change.kv_group
        table = row.tables[group]
        if change.op is TableOp.APPEND:
            self._hashes.hand_out(group, change.block_ids)
            table.extend(change.block_ids)
        elif change.op is TableOp.REPLACE:
            # Blocks that hold computed tokens come from the prefix cache or from a parent; the others are new.
            num_hits = int(self._num_computed[change.req_index]) // self._limits.block_size
            self._hashes.hand_out(group, change.block_ids[num_hits:])
            table[:] = change.block_ids
        elif change.op is TableOp.DROP_LEADING:
            table[: change.value] = [0] * change.value
        else:
            row.state_slots[group] = change.value

    def freeze(self, now: float) -> FrozenBatch:
        """Return a copy of the present moment, to be read at leisure."""
        held: list[set[int]] = [set() for _ in range(self._limits.num_kv_groups)]
        for row in self._rows.values():
            for group, table in enumerate(row.tables):
                held[group].update(table)
        told: set[int] = set()  # prompts whose log-probabilities a row before has
        return FrozenBatch(
            step=self.step,
            state_digest=self.state_digest,
            token_digest=self.token_digest,
            rows=tuple(self._frozen(req_index, row, now, told) for req_index, row in sorted(self._rows.items())),
            block_hashes=tuple(tuple(self._hashes.free(group, blocks)) for group, blocks in enumerate(held)),
        )

    def _frozen(self, req_index: int, row: _Row, now: float, told: set[int]) -> FrozenRow:
        state = RowState.DECODE if self._decodes[req_index] else RowState.PREFILL
        prompt = row.prompt_logprobs if id(row.prompt_logprobs) not in told else None
        told.add(id(prompt))
        return FrozenRow(
            req_index=req_index,
            request=row.request,
            state=RowState.PREEMPTED if self._preempted[req_index] else state,
            token_ids=self.known_tokens(req_index).copy(),
            num_computed_tokens=int(self._num_computed[req_index]),
            num_prefill_tokens=int(self._num_prefill[req_index]),
            tables=tuple(tuple(table) for table in row.tables),
            state_slots=tuple(sorted(row.state_slots.items())),
            age_s=max(0.0, now - row.entered_at),
            is_void=bool(self._void[req_index]),
            logprobs=row.logprobs.part(0) if row.logprobs is not None else None,
            prompt_logprobs=prompt.part(0) if prompt is not None else None,
        )

    def wipe(self) -> None:
        """Overwrite what users sent."""
        for row, count in enumerate(np.maximum(self._num_written, self._num_known).tolist()):
            self._token_ids[row, :count] = 0
        self._rows.clear()
        self._entering.clear()
        self._hashes.forget()


def _without_bulk(request: NewRequest) -> NewRequest:
    """Return a copy without what is kept elsewhere: tokens, tables, what holds for its first step only."""
    kept = NewRequest()
    kept.CopyFrom(request)
    for field in ("token_ids", "blocks", "fork_of", "num_scheduled_tokens", "num_prefill_tokens"):
        kept.ClearField(field)
    return kept
