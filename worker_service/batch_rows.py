"""The rows of a batch as a rank keeps them, and the limits they live under. Counts only: no token is looked at."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from worker_service.step_work import Pooling, TableChange, TableOp


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What the group was formed with; fields as in GroupLimits and ModelDescription of worker.proto."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int  # the null block included
    vocab_size: int
    num_kv_groups: int = 1
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0


class RowState(Enum):
    """What a row does when it is not mentioned: nothing, advance, nothing."""

    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3


@dataclass(slots=True)
class Row:
    """One live row. A decode row's count of computed tokens lies in an array of the batch state, not here."""

    row_key: int
    request_id: str
    sample_index: int
    state: RowState
    num_prefill_tokens: int
    num_known_tokens: int  # while it does not decode; a decode row knows one token more than it has computed
    # Set while it is void: the tokens that it really knows. Its other counts go on as if it had sampled (PROTOCOL B6).
    num_void_known_tokens: int | None = None
    # Of what it was scheduled when it last computed, tokens tried ahead that may have been rejected (PROTOCOL B11).
    num_unsettled: int = 0
    tables: list[list[int]] = field(default_factory=list)  # KV group -> block ids; 0 where dropped
    state_slots: dict[int, int] = field(default_factory=dict)  # KV group -> slot, for groups without blocks
    pooling: Pooling | None = None  # set: it never decodes

    def covered_tokens(self, block_size: int) -> int:
        """Tokens for which every KV group has room."""
        return _covered([len(table) for table in self.tables], self.state_slots, block_size)


@dataclass(slots=True)
class RowDraft:
    """What a row is to become, while the delta that says so is checked. Lengths stand for tables."""

    row_key: int
    request_id: str
    sample_index: int
    state: RowState
    num_computed_tokens: int
    num_prefill_tokens: int
    num_known_tokens: int
    num_blocks: list[int]  # KV group -> entries of its table
    slot_groups: set[int]  # KV groups with a state slot, which need no blocks
    num_scheduled_tokens: int | None = None  # None: not said
    samples: bool = False  # it samples at the end of this step and decodes from the next on
    pooling: Pooling | None = None
    pools: bool = False  # its vector is complete at the end of this step; from the next on it does nothing

    @property
    def tries_ahead(self) -> bool:
        """Whether it decodes, and computes more than the token that it knows."""
        return self.state is RowState.DECODE and (self.num_scheduled_tokens or 0) > 1

    def covered_tokens(self, block_size: int) -> int:
        """Tokens for which every KV group has room."""
        return _covered(self.num_blocks, self.slot_groups, block_size)


def _covered(num_blocks: list[int], slot_groups: Container[int], block_size: int) -> int:
    return min((n * block_size for group, n in enumerate(num_blocks) if group not in slot_groups), default=1 << 31)


def apply_table_change(row: Row, change: TableChange) -> tuple[int, list[int]]:
    """Change a row's table; return (first place, block ids now there) of what changed, for the digest."""
    table = row.tables[change.kv_group]
    if change.op is TableOp.APPEND:
        place = len(table)
        table.extend(change.block_ids)
        return place, table[place:]
    if change.op is TableOp.REPLACE:
        table[:] = change.block_ids
        return 0, table
    if change.op is TableOp.DROP_LEADING:
        table[: change.value] = [0] * change.value
        return 0, table[: change.value]
    row.state_slots[change.kv_group] = change.value
    return 0, []
