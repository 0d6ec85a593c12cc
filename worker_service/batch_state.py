"""Keep this rank's copy of the batch state, from deltas alone.

A delta is applied in two phases. ``check_delta`` reads it against the state and changes nothing: it raises on the first
rule broken, or returns what the rows become. Then the state takes that over and compares its digest with the delta's
(PROTOCOL A2, B7). No torch, no grpc; nothing here waits.

A step of unmentioned decode rows costs a few vector operations: counts lie in arrays by row, and the array of decode
rows is made anew only when it changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from service_chassis.errors import DeltaRefused, OutOfOrder
from service_chassis.protocol.digest import StateDigest
from worker_service.batch_rows import BatchLimits, Row, RowDraft, RowState, apply_table_change
from worker_service.delta_check import Transition, check_delta
from worker_service.step_work import Int32Array, Mode, Speculation, StepWork

__all__ = ["BatchLimits", "BatchState", "DigestMismatch", "RowFacts", "RowState"]


class DigestMismatch(DeltaRefused):
    """The batch state after a delta is not what its sender has: one of the two has diverged. Nothing was launched."""

    def __init__(self, step: int, *, stated: int, computed: int) -> None:
        """Name the digest that the delta states and the one that the state after it has."""
        super().__init__(
            f"step {step}: state_digest={stated:#018x}: the batch state after the delta has {computed:#018x}: diverged"
        )


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What is known of one row. ``num_computed_tokens`` counts those of accepted steps."""

    row_key: int
    request_id: str
    sample_index: int
    state: RowState
    num_computed_tokens: int
    num_known_tokens: int
    num_prefill_tokens: int
    tables: tuple[tuple[int, ...], ...]
    state_slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Compute:
    """Which rows compute in a step, and how much: arrays in parallel, ascending by row."""

    rows: Int32Array
    num_scheduled_tokens: Int32Array
    samples: npt.NDArray[np.bool_]


class BatchState:
    """Rows, tables and counts of one rank. Used by the thread that accepts deltas, and no other."""

    def __init__(self, limits: BatchLimits, *, accepted: int = 0) -> None:
        """Start with an empty batch after step ``accepted``."""
        self.limits = limits
        self.accepted = accepted
        self._rows: dict[int, Row] = {}  # req_index -> row
        self._digest = StateDigest()
        # By req_index; what they say of rows that do not decode is not looked at by a steady step.
        self._num_computed: Int32Array = np.zeros(limits.max_num_seqs, np.int32)
        # Computed tokens up to which an unmentioned row may go: its blocks end there, or its context.
        self._room: Int32Array = np.zeros(limits.max_num_seqs, np.int32)
        self._decodes: npt.NDArray[np.bool_] = np.zeros(limits.max_num_seqs, np.bool_)
        self._steady: _Compute | None = None  # one token for every decode row; None after a change of `_decodes`
        self._unsettled: set[int] = set()  # decode rows that tried tokens ahead when they last computed

    @property
    def digest(self) -> int:
        """State digest after ``accepted``."""
        return self._digest.value

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return len(self._rows)

    def rows(self) -> dict[int, RowFacts]:
        """Return what is known of every live row, by req_index."""
        return {req_index: self._facts(req_index, row) for req_index, row in sorted(self._rows.items())}

    def apply(self, delta: SchedulerDelta | bytes) -> StepWork:
        """Check a delta, take it over, and say what it means for the device.

        Raises:
            OutOfOrder: its step is not ``accepted + 1``; nothing was changed.
            DeltaRefused: its content breaks a rule; nothing was changed.
            DigestMismatch: the rank is lost; nothing may be launched, the state is of no use any more.
        """
        if isinstance(delta, bytes):
            delta = _parse(delta)
        if delta.step != self.accepted + 1:
            raise OutOfOrder(
                f"step {delta.step} came, {self.accepted + 1} is due",
                metadata={"expected_step": str(self.accepted + 1)},
            )
        change = check_delta(delta, self._rows, self._num_computed, self.limits)
        compute = self._plan(change)
        num_computed = self._num_computed_before(change, compute)
        speculation = self._speculation(change)
        self._take_over(change, compute)
        if self._digest.value != delta.state_digest:
            raise DigestMismatch(delta.step, stated=delta.state_digest, computed=self._digest.value)
        self.accepted = delta.step
        return StepWork(
            step=delta.step,
            mode=change.mode,
            finished=tuple(change.finished),
            preempted=tuple(change.preempted),
            block_copies=tuple(change.block_copies),
            new_rows=tuple(change.new_rows),
            resumed=tuple(change.resumed),
            table_changes=tuple(change.table_changes),
            rows=compute.rows,
            num_computed_tokens=num_computed,
            num_scheduled_tokens=compute.num_scheduled_tokens,
            samples=compute.samples,
            pooled=tuple(sorted(row for row, draft in change.drafts.items() if draft.pools)),
            awaits_mask=change.awaits_mask,
            forget_prefix_cache=delta.forget_prefix_cache,
            state_digest=delta.state_digest,
            speculation=speculation,
        )

    def row_key(self, req_index: int) -> int | None:
        """Return what tells a row from others that had its place; None: there is none."""
        row = self._rows.get(req_index)
        return row.row_key if row is not None else None

    def note_void(self, req_index: int, row_key: int, num_known_tokens: int) -> None:
        """A completed step gave a row no token, so that it knows no more than this. It may have left meanwhile."""
        row = self._rows.get(req_index)
        if row is not None and row.row_key == row_key and row.num_void_known_tokens is None:
            row.num_void_known_tokens = num_known_tokens

    # --- phase one, the part about rows that are not named

    def _plan(self, change: Transition) -> _Compute:
        """Say which rows compute; check those that advance unmentioned. Changes nothing but the steady cache."""
        if change.mode is not Mode.RUN:
            return _NOTHING
        if self._steady is None:
            rows = np.flatnonzero(self._decodes).astype(np.int32)
            self._steady = _Compute(rows, np.ones(len(rows), np.int32), np.ones(len(rows), np.bool_))
        steady = self._steady
        stays = [r for r, d in change.drafts.items() if d.num_scheduled_tokens == 0 and d.state is RowState.DECODE]
        leaves = [*change.gone, *change.preempted, *stays]
        if any(self._decodes[row] for row in leaves):
            mask = self._decodes.copy()
            mask[leaves] = False
            rows = np.flatnonzero(mask).astype(np.int32)
            steady = _Compute(rows, np.ones(len(rows), np.int32), np.ones(len(rows), np.bool_))
        self._check_room(change, steady.rows)
        num_tokens = len(steady.rows)
        if self.limits.num_speculative_tokens:
            steady, num_tokens = _with_tries(steady, change)
        chunks = sorted(r for r, d in change.drafts.items() if d.num_scheduled_tokens and d.state is RowState.PREFILL)
        num_tokens += sum(change.drafts[row].num_scheduled_tokens or 0 for row in chunks)
        if num_tokens > self.limits.max_num_batched_tokens:
            raise DeltaRefused(
                f"step {change.step}: num_scheduled_tokens={num_tokens}: over all rows "
                f"at most max_num_batched_tokens {self.limits.max_num_batched_tokens}"
            )
        return _merge(steady, chunks, [change.drafts[row] for row in chunks]) if chunks else steady

    def _check_room(self, change: Transition, rows: Int32Array) -> None:
        """Check that decode rows have a block and a place in the context for the token that they compute."""
        for row in rows[self._num_computed[rows] >= self._room[rows]].tolist():
            draft = change.drafts.get(row)
            num_computed = int(self._num_computed[row]) if draft is None else draft.num_computed_tokens
            if num_computed + 2 > self.limits.max_model_len:
                raise DeltaRefused(
                    f"step {change.step}: row {row}: {num_computed + 2} known tokens: "
                    f"at most max_model_len {self.limits.max_model_len}"
                )
            covered = (draft or self._rows[row]).covered_tokens(self.limits.block_size)
            if num_computed + 1 > covered:
                raise DeltaRefused(
                    f"step {change.step}: row {row}: {num_computed} computed and 1 scheduled token: "
                    f"its blocks hold {covered}"
                )

    def _num_computed_before(self, change: Transition, compute: _Compute) -> Int32Array:
        """Return the computed tokens of the rows that compute, before they do."""
        num_computed: Int32Array = self._num_computed[compute.rows]
        for row, draft in change.drafts.items():
            is_chunk = draft.num_scheduled_tokens and draft.state is RowState.PREFILL
            if is_chunk or (row in self._unsettled and self._computes(row, change) and len(num_computed)):
                num_computed[np.searchsorted(compute.rows, row)] = draft.num_computed_tokens
        return num_computed

    def _speculation(self, change: Transition) -> Speculation | None:
        """Say which rows try tokens ahead, and of which it is known by now what was accepted."""
        if not self.limits.num_speculative_tokens or change.mode is not Mode.RUN:
            return None
        rows = [row for row, draft in change.drafts.items() if draft.tries_ahead]
        if not (rows or self._unsettled):
            return None
        return Speculation(
            rows=tuple(sorted(rows)),
            settled=tuple(sorted(row for row in self._unsettled if self._computes(row, change))),
            prompt_lookup_min=self.limits.prompt_lookup_min,
            prompt_lookup_max=self.limits.prompt_lookup_max,
        )

    @staticmethod
    def _computes(row: int, change: Transition) -> bool:
        """Whether a row that decoded before a RUN step does so in it."""
        draft = change.drafts.get(row)
        stays = draft is None or (draft.state is RowState.DECODE and draft.num_scheduled_tokens != 0)
        return stays and row not in change.gone

    # --- phase two: nothing fails from here on

    def _take_over(self, change: Transition, compute: _Compute) -> None:
        """Make the state what ``change`` says, in the order of application."""
        digest = self._digest
        for finished in change.finished:
            row = self._rows.pop(finished.req_index)
            digest.remove(finished.req_index, self._held(finished.req_index, row))
            self._set_decodes(finished.req_index, False)
        for req_index in change.preempted:
            row = self._rows[req_index]
            digest.clear(req_index, self._held(req_index, row))
            row.state = RowState.PREEMPTED
            row.tables = [[] for _ in range(self.limits.num_kv_groups)]
            row.state_slots.clear()
            self._set_decodes(req_index, False)
        if change.mode is Mode.RUN:
            digest.advance_unmentioned()
            self._num_computed[self._decodes] += 1
            for req_index in [row for row in self._unsettled if self._computes(row, change)]:
                self._settle(req_index)
        for new in change.new_rows:
            draft = change.drafts[new.req_index]
            self._rows[new.req_index] = _row_of(draft, self.limits.num_kv_groups)
            digest.add(new.req_index, new.row_key)
        for table_change in change.table_changes:
            place, blocks = apply_table_change(self._rows[table_change.req_index], table_change)
            digest.put_blocks(table_change.req_index, table_change.kv_group, place, blocks)
        entered = {new.req_index for new in change.new_rows}
        for req_index, draft in change.drafts.items():
            self._take_over_row(req_index, draft, change.mode, is_new=req_index in entered)

    def _take_over_row(self, req_index: int, draft: RowDraft, mode: Mode, *, is_new: bool) -> None:
        """Give a row that was named its new counts and state."""
        row = self._rows[req_index]
        if draft.state is RowState.DECODE:
            # It advanced with the others; it may be paused, try more, or have had less accepted than was counted.
            num_tokens = 1 if draft.num_scheduled_tokens is None else draft.num_scheduled_tokens
            after = draft.num_computed_tokens + (num_tokens if mode is Mode.RUN else 0)
            if more := after - int(self._num_computed[req_index]):
                self._digest.compute(req_index, more)
                self._num_computed[req_index] = after
            if draft.tries_ahead:
                row.num_unsettled = num_tokens - 1
                self._unsettled.add(req_index)
        else:
            came_back = row.state is RowState.PREEMPTED or is_new
            before = 0 if came_back or draft.state is RowState.PREEMPTED else int(self._num_computed[req_index])
            after = draft.num_computed_tokens + (draft.num_scheduled_tokens or 0)
            if draft.state is RowState.PREFILL:
                self._digest.compute(req_index, after - before)
            self._num_computed[req_index] = after
            row.state = RowState.DECODE if draft.samples else draft.state
            if draft.state is RowState.PREFILL:
                row.num_unsettled = 0
            row.num_prefill_tokens = draft.num_prefill_tokens
            if came_back and draft.num_known_tokens == row.num_void_known_tokens:
                row.num_void_known_tokens = None
            row.num_known_tokens = draft.num_known_tokens
            if draft.samples:
                self._digest.set_advance(req_index, 1)
                self._set_decodes(req_index, True)
        covered = draft.covered_tokens(self.limits.block_size)
        self._room[req_index] = min(covered, self.limits.max_model_len - 1)

    def _held(self, req_index: int, row: Row) -> int:
        """Computed tokens that the digest counts for a row."""
        return 0 if row.state is RowState.PREEMPTED else int(self._num_computed[req_index])

    def _set_decodes(self, req_index: int, decodes: bool) -> None:
        if self._decodes[req_index] != decodes:
            self._decodes[req_index] = decodes
            self._steady = None
            self._unsettled.discard(req_index)

    def _settle(self, req_index: int) -> None:
        self._unsettled.discard(req_index)
        self._rows[req_index].num_unsettled = 0

    def _facts(self, req_index: int, row: Row) -> RowFacts:
        num_computed = self._held(req_index, row)
        return RowFacts(
            row_key=row.row_key,
            request_id=row.request_id,
            sample_index=row.sample_index,
            state=row.state,
            num_computed_tokens=num_computed,
            num_known_tokens=num_computed + 1 if row.state is RowState.DECODE else row.num_known_tokens,
            num_prefill_tokens=row.num_prefill_tokens,
            tables=tuple(tuple(table) for table in row.tables),
            state_slots=tuple(sorted(row.state_slots.items())),
        )


_NOTHING = _Compute(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_))


def _parse(raw: bytes) -> SchedulerDelta:
    try:
        return SchedulerDelta.FromString(raw)
    except DecodeError:
        raise DeltaRefused(f"a delta of {len(raw)} bytes is not a well-formed SchedulerDelta") from None


def _row_of(draft: RowDraft, num_kv_groups: int) -> Row:
    return Row(
        row_key=draft.row_key,
        request_id=draft.request_id,
        sample_index=draft.sample_index,
        state=draft.state,
        num_prefill_tokens=draft.num_prefill_tokens,
        num_known_tokens=draft.num_known_tokens,
        tables=[[] for _ in range(num_kv_groups)],
        pooling=draft.pooling,
    )


def _with_tries(steady: _Compute, change: Transition) -> tuple[_Compute, int]:
    """Give rows that try tokens ahead what they are scheduled; return the tokens of all rows, too."""
    tries = {row: draft.num_scheduled_tokens or 0 for row, draft in change.drafts.items() if draft.tries_ahead}
    if not tries:
        return steady, len(steady.rows)
    scheduled = steady.num_scheduled_tokens.copy()
    scheduled[np.searchsorted(steady.rows, np.array(list(tries), np.int32))] = list(tries.values())
    return _Compute(steady.rows, scheduled, steady.samples), int(scheduled.sum())


def _merge(steady: _Compute, rows: list[int], drafts: list[RowDraft]) -> _Compute:
    """Add prefill chunks to the rows that decode."""
    all_rows = np.concatenate([steady.rows, np.array(rows, np.int32)])
    order = np.argsort(all_rows)
    scheduled = np.concatenate(
        [steady.num_scheduled_tokens, np.array([draft.num_scheduled_tokens for draft in drafts], np.int32)]
    )
    samples = np.concatenate([steady.samples, np.array([draft.samples for draft in drafts], np.bool_)])
    return _Compute(all_rows[order], scheduled[order], samples[order])
