"""Check a delta against the batch state, completely, before anything changes (PROTOCOL A2).

Every rule that a delta's content must keep stands here, with the sentence that the owner reads. A check reads the state
and returns a ``Transition``: what the rows become, row by row. Whoever gets it can no longer fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from maniple.v1 import sampling_pb2
from maniple.v1 import scheduler_delta_pb2 as delta_pb2
from maniple.v1.scheduler_delta_pb2 import BlockChange, NewRequest, RowChange, RowFinished, SchedulerDelta
from service_chassis.errors import DeltaRefused
from service_chassis.protocol.block_hash import HASH_BYTES
from worker_service.batch_rows import BatchLimits, Row, RowDraft, RowState
from worker_service.step_work import (
    FinishedRow,
    Int32Array,
    Mode,
    NewRow,
    Pooling,
    ResumedRow,
    RowSampling,
    TableChange,
    TableOp,
)

_MODES = {
    SchedulerDelta.MODE_UNSPECIFIED: Mode.RUN,
    SchedulerDelta.MODE_RUN: Mode.RUN,
    SchedulerDelta.MODE_APPLY_ONLY: Mode.APPLY_ONLY,
    SchedulerDelta.MODE_DUMMY: Mode.DUMMY,
}
_BLOCK_OPS = {"append": TableOp.APPEND, "replace": TableOp.REPLACE}
_POOLING_IS_MEAN = {
    delta_pb2.Pooling.KIND_UNSPECIFIED: False,
    delta_pb2.Pooling.KIND_LAST: False,
    delta_pb2.Pooling.KIND_MEAN: True,
}
_VALUE_OPS = {"drop_leading": TableOp.DROP_LEADING, "state_slot": TableOp.STATE_SLOT}


@dataclass(slots=True)
class Transition:
    """A delta that keeps every rule, read against the state before it. Lists are in the order of application."""

    step: int
    mode: Mode
    finished: list[FinishedRow] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    resumed: list[ResumedRow] = field(default_factory=list)
    table_changes: list[TableChange] = field(default_factory=list)
    drafts: dict[int, RowDraft] = field(default_factory=dict)  # rows that are preempted, enter or are mentioned
    gone: set[int] = field(default_factory=set)  # rows that finish
    awaits_mask: tuple[int, ...] = ()


def check_delta(
    delta: SchedulerDelta, rows: Mapping[int, Row], num_computed_tokens: Int32Array, limits: BatchLimits
) -> Transition:
    """Read ``delta`` against the state before it; nothing is changed.

    What concerns rows that the delta does not name is left to the caller: there may be many.

    Args:
        delta: of the step that is due.
        rows: the live rows.
        num_computed_tokens: [max_num_seqs] by row; what it says of rows that are not live means nothing.
        limits: of the group.
    Raises:
        DeltaRefused: names the row or field, the value and the rule that it breaks.
    """
    return _Check(delta, rows, num_computed_tokens, limits).run()


class _Check:
    def __init__(
        self, delta: SchedulerDelta, rows: Mapping[int, Row], num_computed_tokens: Int32Array, limits: BatchLimits
    ) -> None:
        self._delta = delta
        self._rows = rows
        self._num_computed = num_computed_tokens
        self._limits = limits
        if delta.mode not in _MODES:
            self._refuse("mode", delta.mode, "must be RUN, APPLY_ONLY or DUMMY")
        self._next = Transition(delta.step, _MODES[delta.mode])
        self._named: set[int] = set()  # rows in new_requests and changes

    def run(self) -> Transition:
        delta = self._delta
        self._check_reserved()
        for finished in delta.finished:
            self._finish(finished)
        for req_index in delta.preempted:
            self._preempt(req_index)
        self._copy_blocks()
        # A fork reads its parent as the steps before left it, so parents are looked up among the rows of before.
        for new in delta.new_requests:
            self._enter(new)
        for change in delta.changes:
            self._change(change)
        if delta.awaits_mask:
            self._check_masks()
        return self._next

    def _refuse(self, what: str, value: object, rule: str) -> NoReturn:
        raise DeltaRefused(f"step {self._delta.step}: {what}={value}: {rule}")

    def _check_reserved(self) -> None:
        """Refuse what the protocol has and this rank does not."""
        delta = self._delta
        if delta.lane:
            self._refuse("lane", delta.lane, "must be 0: there is one pipeline stage")
        for name, values in (
            ("zero_blocks", delta.zero_blocks),
            ("transfers", delta.transfers),
            ("lora_slots", delta.lora_slots),
        ):
            if values:
                self._refuse(name, f"{len(values)} entries", "must be empty: this rank has no such feature")

    # --- rows that leave or lose their blocks

    def _live(self, field_name: str, req_index: int) -> Row:
        row = self._rows.get(req_index)
        if row is None or req_index in self._next.gone:
            self._refuse(field_name, req_index, "the row must be live")
        return row

    def _known(self, req_index: int, row: Row) -> int:
        """Tokens a row knows before this delta at most, those included that steps before are still to sample."""
        if row.state is RowState.DECODE:
            return int(self._num_computed[req_index]) + 1
        return row.num_known_tokens

    def _finish(self, finished: RowFinished) -> None:
        req_index, num_tokens = finished.req_index, finished.num_tokens
        row = self._live("finished.req_index", req_index)
        if finished.hold:
            self._refuse(f"row {req_index}: finished.hold", True, "must be unset: this rank transfers no blocks")
        if num_tokens > (known := self._known(req_index, row)):
            self._refuse(f"row {req_index}: finished.num_tokens", num_tokens, f"must be at most the {known} known")
        self._next.gone.add(req_index)
        self._next.finished.append(FinishedRow(req_index, finished.reason, num_tokens))

    def _preempt(self, req_index: int) -> None:
        row = self._live("preempted", req_index)
        if row.state is RowState.PREEMPTED or req_index in self._next.drafts:
            self._refuse("preempted", req_index, "the row must have blocks")
        draft = self._draft(req_index, row)
        draft.num_known_tokens = self._known(req_index, row)
        draft.state = RowState.PREEMPTED
        draft.num_computed_tokens = 0
        draft.num_blocks = [0] * self._limits.num_kv_groups
        draft.slot_groups = set()
        self._next.preempted.append(req_index)

    def _draft(self, req_index: int, row: Row) -> RowDraft:
        """Return what becomes of a live row, to be changed."""
        draft = self._next.drafts.get(req_index)
        if draft is None:
            draft = self._next.drafts[req_index] = RowDraft(
                row_key=row.row_key,
                request_id=row.request_id,
                sample_index=row.sample_index,
                state=row.state,
                num_computed_tokens=int(self._num_computed[req_index]) if row.state is not RowState.PREEMPTED else 0,
                num_prefill_tokens=row.num_prefill_tokens,
                num_known_tokens=row.num_known_tokens,
                num_blocks=[len(table) for table in row.tables],
                slot_groups=set(row.state_slots),
                pooling=row.pooling,
            )
        return draft

    def _copy_blocks(self) -> None:
        written: set[tuple[int, int]] = set()
        for copy in self._delta.block_copies:
            self._check_group("block_copies.kv_group", copy.kv_group)
            self._check_blocks("block_copies.src_block_id", (copy.src_block_id,))
            self._check_blocks("block_copies.dst_block_id", (copy.dst_block_id,))
            if (copy.kv_group, copy.dst_block_id) in written:
                self._refuse("block_copies.dst_block_id", copy.dst_block_id, "must be written once")
            written.add((copy.kv_group, copy.dst_block_id))
            self._next.block_copies.append((copy.kv_group, copy.src_block_id, copy.dst_block_id))

    # --- rows that enter

    def _enter(self, new: NewRequest) -> None:
        req_index, limits = new.req_index, self._limits
        where = f"row {req_index}: new_requests"
        if req_index >= limits.max_num_seqs:
            self._refuse("new_requests.req_index", req_index, f"must be below max_num_seqs {limits.max_num_seqs}")
        if req_index in self._named or (req_index in self._rows and req_index not in self._next.gone):
            self._refuse("new_requests.req_index", req_index, "the row must be free, and named once")
        self._named.add(req_index)
        self._check_unbuilt(new, where)
        if new.sample_index >= max(new.n, 1):
            self._refuse(f"{where}.sample_index", new.sample_index, f"must be below n {new.n}")
        if len(new.cache_namespace) not in (0, HASH_BYTES):
            self._refuse(f"{where}.cache_namespace", f"{len(new.cache_namespace)} bytes", "must have 0 or 16 bytes")
        parent = self._parent(new, where) if new.HasField("fork_of") else None
        token_ids = np.array(new.token_ids, np.uint32)
        if token_ids.size:
            self._check_tokens(f"{where}.token_ids", (int(token_ids.max()),))
        num_known = new.num_prefill_tokens
        if parent is None and len(token_ids) != num_known:
            self._refuse(f"{where}.num_prefill_tokens", num_known, f"must be the {len(token_ids)} tokens given")
        if not 1 <= new.num_prompt_tokens <= num_known < limits.max_model_len:
            self._refuse(
                f"{where}.num_prompt_tokens, num_prefill_tokens",
                (new.num_prompt_tokens, num_known),
                f"must ascend from 1 and stay below max_model_len {limits.max_model_len}",
            )
        pooling = self._pooling(new, f"{where}.pooling") if new.HasField("pooling") else None
        draft = self._next.drafts[req_index] = RowDraft(
            row_key=new.row_key,
            request_id=new.request_id,
            sample_index=new.sample_index,
            state=RowState.PREFILL,
            num_computed_tokens=new.num_computed_tokens,
            num_prefill_tokens=num_known,
            num_known_tokens=num_known,
            num_blocks=[0] * limits.num_kv_groups,
            slot_groups=set(),
            pooling=pooling,
        )
        if parent is not None:
            self._copy_tables(req_index, draft, parent, replaced={change.kv_group for change in new.blocks})
        self._change_tables(where, req_index, draft, new.blocks, allowed=("replace", "state_slot"))
        self._begin_prefill(where, draft)
        self._schedule(where, draft, new.num_scheduled_tokens)
        self._next.new_rows.append(
            NewRow(
                req_index=req_index,
                row_key=new.row_key,
                request_id=new.request_id,
                sample_index=new.sample_index,
                token_ids=token_ids.astype(np.int32),
                num_prompt_tokens=new.num_prompt_tokens,
                num_computed_tokens=new.num_computed_tokens,
                num_prefill_tokens=num_known,
                sampling=self._sampling(where, new.sampling),
                fork_of=new.fork_of if parent is not None else None,
                cache_namespace=new.cache_namespace,
                control_blob=new.control_blob,
                pooling=pooling,
            )
        )

    def _check_unbuilt(self, new: NewRequest, where: str) -> None:
        if new.lane:
            self._refuse(f"{where}.lane", new.lane, "must be 0: there is one pipeline stage")
        if new.advance_limit > 1:
            rule = "must be 1: a row that tries tokens ahead is mentioned"
            self._refuse(f"{where}.advance_limit", new.advance_limit, rule)
        for name, value in (("lora_slot", new.lora_slot), ("dp_cell", new.dp_cell)):
            if value:
                self._refuse(f"{where}.{name}", value, "must be 0: this rank has no such feature")
        if new.prompt_blob_hash:
            self._refuse(f"{where}.prompt_blob_hash", new.prompt_blob_hash.hex(), "must be empty: send the token ids")

    def _pooling(self, new: NewRequest, where: str) -> Pooling:
        """Read how a row becomes a vector."""
        if new.pooling.kind not in _POOLING_IS_MEAN:
            self._refuse(f"{where}.kind", new.pooling.kind, "must be LAST or MEAN")
        if new.n > 1 or new.HasField("fork_of"):
            self._refuse(where, "set", "must be unset with n above 1 or fork_of: a prompt has one vector")
        if new.num_prefill_tokens != new.num_prompt_tokens:
            rule = f"must be unset for a row that knows more than its prompt of {new.num_prompt_tokens} tokens"
            self._refuse(where, "set", rule)
        return Pooling(is_mean=_POOLING_IS_MEAN[new.pooling.kind], normalize=new.pooling.normalize)

    def _parent(self, new: NewRequest, where: str) -> Row:
        """Return the row to fork from: one that got through its prompt in steps before this one."""
        parent = self._rows.get(new.fork_of)
        if parent is None or new.fork_of in self._next.gone or new.fork_of in self._next.drafts:
            self._refuse(f"{where}.fork_of", new.fork_of, "must be a row that stays in the batch as it is")
        if parent.state is not RowState.DECODE:
            self._refuse(f"{where}.fork_of", new.fork_of, f"must be a decode row, it is {parent.state.name.lower()}")
        if new.token_ids:
            self._refuse(f"{where}.token_ids", f"{len(new.token_ids)} ids", "must be empty with fork_of")
        num_known = self._known(new.fork_of, parent) - parent.num_unsettled
        if new.num_prefill_tokens > num_known:
            rule = f"must be at most the {num_known} that fork_of knows"
            self._refuse(f"{where}.num_prefill_tokens", new.num_prefill_tokens, rule)
        return parent

    def _copy_tables(self, req_index: int, draft: RowDraft, parent: Row, replaced: set[int]) -> None:
        """A fork starts with its parent's tables, except those it brings itself."""
        for group, table in enumerate(parent.tables):
            if group not in replaced and group not in parent.state_slots:
                draft.num_blocks[group] = len(table)
                self._next.table_changes.append(TableChange(req_index, group, TableOp.REPLACE, tuple(table)))

    def _sampling(self, where: str, sampling: sampling_pb2.RowSampling) -> RowSampling:
        where = f"{where}.sampling"
        for name in ("stop_ids", "logit_bias_ids", "allowed_token_ids"):
            self._check_tokens(f"{where}.{name}", getattr(sampling, name))
        for word in sampling.bad_words:
            self._check_tokens(f"{where}.bad_words", word.token_ids)
            if not word.token_ids:
                self._refuse(f"{where}.bad_words", "[]", "must have at least one id")
        if len(sampling.logit_bias_ids) != len(sampling.logit_bias_values):
            rule = f"must be as many as the {len(sampling.logit_bias_ids)} ids"
            self._refuse(f"{where}.logit_bias_values", len(sampling.logit_bias_values), rule)
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            self._refuse(f"{where}.temperature", sampling.temperature, "must be finite and at least 0")
        if not 0 < sampling.top_p <= 1:
            self._refuse(f"{where}.top_p", sampling.top_p, "must be in (0, 1]")
        if not 0 <= sampling.min_p <= 1:
            self._refuse(f"{where}.min_p", sampling.min_p, "must be in [0, 1]")
        for name in ("num_logprobs_plus_one", "num_prompt_logprobs_plus_one"):
            if getattr(sampling, name) > self._limits.vocab_size + 1:
                rule = f"must be at most one more than the vocabulary, {self._limits.vocab_size}"
                self._refuse(f"{where}.{name}", getattr(sampling, name), rule)
        if sampling.logprobs_mode not in sampling_pb2.LogprobsMode.values():
            self._refuse(f"{where}.logprobs_mode", sampling.logprobs_mode, "must be one of LogprobsMode")
        if not 0 < sampling.repetition_penalty < math.inf:
            self._refuse(f"{where}.repetition_penalty", sampling.repetition_penalty, "must be above 0")
        return RowSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            stop_ids=tuple(sampling.stop_ids),
            logit_bias=tuple(zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True)),
            allowed_token_ids=tuple(sampling.allowed_token_ids),
            bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
            num_logprobs=sampling.num_logprobs_plus_one - 1 if sampling.num_logprobs_plus_one else None,
            num_prompt_logprobs=(
                sampling.num_prompt_logprobs_plus_one - 1 if sampling.num_prompt_logprobs_plus_one else None
            ),
            logprobs_mode=sampling.logprobs_mode,
        )

    # --- rows that are mentioned

    def _change(self, change: RowChange) -> None:
        req_index = change.req_index
        where = f"row {req_index}: changes"
        if req_index in self._named:
            self._refuse("changes.req_index", req_index, "the row must be named once")
        row = self._live("changes.req_index", req_index)
        self._named.add(req_index)
        if change.HasField("advance_limit") and change.advance_limit != 1:
            rule = "must be 1: a row that tries tokens ahead is mentioned"
            self._refuse(f"{where}.advance_limit", change.advance_limit, rule)
        if change.draft_token_ids:
            rule = "must be empty: what is tried ahead is proposed by the ranks"
            self._refuse(f"{where}.draft_token_ids", f"{len(change.draft_token_ids)} ids", rule)
        draft = self._draft(req_index, row)
        if draft.state is RowState.PREEMPTED:
            if not change.HasField("num_prefill_tokens"):
                if change.blocks or change.num_scheduled_tokens or change.HasField("num_computed_tokens"):
                    self._refuse(where, "a preempted row", "comes back by a replacing change with num_prefill_tokens")
                return
            self._resume(where, req_index, draft, change, row)
        else:
            if change.HasField("num_prefill_tokens"):
                rule = "is said only of a preempted row"
                self._refuse(f"{where}.num_prefill_tokens", change.num_prefill_tokens, rule)
            if change.HasField("num_computed_tokens"):
                self._settle(f"{where}.num_computed_tokens", draft, change, row.num_unsettled)
            allowed = ("append", "drop_leading", "state_slot")
            self._change_tables(where, req_index, draft, change.blocks, allowed=allowed)
        if change.HasField("num_scheduled_tokens"):
            self._schedule(where, draft, change.num_scheduled_tokens)

    def _settle(self, where: str, draft: RowDraft, change: RowChange, num_unsettled: int) -> None:
        """Of a row that tried tokens ahead it is said how many were accepted."""
        num_computed_tokens = change.num_computed_tokens
        pauses = change.HasField("num_scheduled_tokens") and not change.num_scheduled_tokens
        if not num_unsettled or pauses or self._next.mode is not Mode.RUN:
            rule = "is said only of a preempted row, and of one that tried tokens ahead when it next computes"
            self._refuse(where, num_computed_tokens, rule)
        most = draft.num_computed_tokens
        if not most - num_unsettled <= num_computed_tokens <= most:
            self._refuse(where, num_computed_tokens, f"must be {most - num_unsettled} to {most}, as it was scheduled")
        draft.num_computed_tokens = num_computed_tokens

    def _resume(self, where: str, req_index: int, draft: RowDraft, change: RowChange, row: Row) -> None:
        """Bring a preempted row back: new tables, and all its known tokens to compute.

        A void row comes back with what it really knows. But an owner that died did not know that it would be void, and
        what it had sent before must be taken for what it was.
        """
        most, num_void_known = draft.num_known_tokens, row.num_void_known_tokens
        least = most - row.num_unsettled
        if not least <= change.num_prefill_tokens <= most and change.num_prefill_tokens != num_void_known:
            known = f"{least} to {most}" if least < most else most
            rule = f"must be the {known if num_void_known is None else num_void_known} tokens it knows"
            self._refuse(f"{where}.num_prefill_tokens", change.num_prefill_tokens, rule)
        draft.state = RowState.PREFILL
        draft.num_prefill_tokens = change.num_prefill_tokens
        draft.num_computed_tokens = change.num_computed_tokens
        draft.num_known_tokens = change.num_prefill_tokens
        self._next.resumed.append(ResumedRow(req_index, change.num_computed_tokens, change.num_prefill_tokens))
        self._change_tables(where, req_index, draft, change.blocks, allowed=("replace", "state_slot"))
        self._begin_prefill(where, draft)

    def _begin_prefill(self, where: str, draft: RowDraft) -> None:
        """Check a row that has just got its tables."""
        if draft.num_computed_tokens >= draft.num_prefill_tokens:
            rule = f"must be below num_prefill_tokens {draft.num_prefill_tokens}"
            self._refuse(f"{where}.num_computed_tokens", draft.num_computed_tokens, rule)
        if draft.num_computed_tokens and draft.pooling is not None and draft.pooling.is_mean:
            rule = "must be 0: a mean is over the hidden states of all tokens, and the cache holds none"
            self._refuse(f"{where}.num_computed_tokens", draft.num_computed_tokens, rule)
        for group, num_blocks in enumerate(draft.num_blocks):
            if not num_blocks and group not in draft.slot_groups:
                self._refuse(f"{where}.blocks", "none", f"KV group {group} must have a table or a state slot")
        self._check_covered(where, draft, draft.num_computed_tokens)

    def _change_tables(
        self, where: str, req_index: int, draft: RowDraft, changes: Iterable[BlockChange], allowed: tuple[str, ...]
    ) -> None:
        seen: set[int] = set()
        for change in changes:
            group, which = change.kv_group, change.WhichOneof("change")
            self._check_group(f"{where}.blocks.kv_group", group)
            if group in seen:
                self._refuse(f"{where}.blocks.kv_group", group, "must be named once")
            seen.add(group)
            if which not in allowed:
                rule = f"must be one of {', '.join(allowed)} for a row in this state"
                self._refuse(f"{where}.blocks.change", which, rule)
            if which in _BLOCK_OPS:
                ids = tuple(getattr(change, which).ids)
                self._check_blocks(f"{where}.blocks.{which}", ids)
                draft.num_blocks[group] = len(ids) + (draft.num_blocks[group] if which == "append" else 0)
                self._next.table_changes.append(TableChange(req_index, group, _BLOCK_OPS[which], ids))
                continue
            value = getattr(change, which)
            if which == "state_slot":
                draft.slot_groups.add(group)
            elif value > draft.num_blocks[group]:
                rule = f"must be at most the {draft.num_blocks[group]} entries of the table"
                self._refuse(f"{where}.blocks.drop_leading", value, rule)
            self._next.table_changes.append(TableChange(req_index, group, _VALUE_OPS[which], value=value))

    def _schedule(self, where: str, draft: RowDraft, num_tokens: int) -> None:
        """A row's tokens of this step are said."""
        where = f"{where}.num_scheduled_tokens"
        if num_tokens and self._next.mode is not Mode.RUN:
            self._refuse(where, num_tokens, f"nobody advances in a step of mode {self._next.mode.name}")
        if draft.state is RowState.DECODE:
            if num_tokens > 1:
                self._try_ahead(where, draft, num_tokens)
        else:
            left = draft.num_prefill_tokens - draft.num_computed_tokens
            if num_tokens > left:
                self._refuse(where, num_tokens, f"must be at most the {left} tokens left of its prefill")
            is_last = num_tokens == left
            # A row whose vector is complete has nothing left, and must not complete it again.
            draft.samples = is_last and draft.pooling is None
            draft.pools = is_last and draft.pooling is not None and num_tokens > 0
        self._check_covered(where, draft, draft.num_computed_tokens + num_tokens)
        draft.num_scheduled_tokens = num_tokens

    def _try_ahead(self, where: str, draft: RowDraft, num_tokens: int) -> None:
        """A decode row computes more than the token that it knows."""
        limits = self._limits
        if num_tokens > 1 + limits.num_speculative_tokens:
            rule = f"a decode row computes 1 token, and num_speculative_tokens {limits.num_speculative_tokens} at most"
            self._refuse(where, num_tokens, rule)
        if (num_known := draft.num_computed_tokens + num_tokens + 1) > limits.max_model_len:
            rule = f"{num_known} known tokens may come of it: at most max_model_len {limits.max_model_len}"
            self._refuse(where, num_tokens, rule)

    # --- what holds for several fields

    def _check_covered(self, where: str, draft: RowDraft, num_tokens: int) -> None:
        covered = draft.covered_tokens(self._limits.block_size)
        if num_tokens > covered:
            self._refuse(where, num_tokens, f"the row's blocks hold {covered} tokens, computed and scheduled ones")

    def _check_group(self, where: str, kv_group: int) -> None:
        if kv_group >= self._limits.num_kv_groups:
            self._refuse(where, kv_group, f"must be below the number of KV groups, {self._limits.num_kv_groups}")

    def _check_blocks(self, where: str, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if not 0 < block_id < self._limits.num_blocks:
                rule = f"must be in [1, {self._limits.num_blocks}); 0 is the null block"
                self._refuse(where, block_id, rule)

    def _check_tokens(self, where: str, token_ids: Iterable[int]) -> None:
        worst = max(token_ids, default=0)
        if worst >= self._limits.vocab_size:
            self._refuse(where, worst, f"must be below the size of the vocabulary, {self._limits.vocab_size}")

    def _check_masks(self) -> None:
        rows = tuple(self._delta.awaits_mask)
        if list(rows) != sorted(set(rows)):
            self._refuse("awaits_mask", rows, "must ascend")
        for req_index in rows:
            draft, row = self._next.drafts.get(req_index), self._rows.get(req_index)
            if draft is not None:
                decodes = draft.state is RowState.DECODE and draft.num_scheduled_tokens != 0
                samples = draft.samples or decodes
            else:
                samples = row is not None and req_index not in self._next.gone and row.state is RowState.DECODE
            if not samples or self._next.mode is not Mode.RUN:
                self._refuse("awaits_mask", req_index, "the row must sample in this step")
            if draft is not None and draft.tries_ahead:
                self._refuse("awaits_mask", req_index, "a row under a mask tries no tokens ahead")
        self._next.awaits_mask = rows
