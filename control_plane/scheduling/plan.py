"""What one step does, as plain values: the scheduler's decision, and what comes back of it.

A plan is complete: whoever encodes it needs no look at the scheduler. Order of application as in PROTOCOL B: finished,
preempted, block copies, new rows, changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from control_plane.scheduling.request import FinishReason, Request, Sample
from service_chassis.ids import BlockId, ReqIndex, RowKey, Step


class PlanMode(Enum):
    """What the ranks do with a step."""

    RUN = 1  # one forward pass; answered by a result
    APPLY_ONLY = 2  # bookkeeping; acknowledged as accepted


@dataclass(frozen=True, slots=True)
class RowEnd:
    """A row leaves."""

    req_index: ReqIndex
    reason: FinishReason
    num_tokens: int  # prompt and output that count
    num_computed_tokens: int  # its computed count, planned steps included: what its digest held


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A row loses its blocks and keeps its tokens."""

    req_index: ReqIndex
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row enters, with the blocks of its whole prefill."""

    req_index: ReqIndex
    row_key: RowKey
    sample: Sample
    fork_of: ReqIndex | None  # set: its tokens are the first `num_prefill_tokens` of that row's
    token_ids: tuple[int, ...]  # empty with `fork_of`
    num_computed_tokens: int
    num_prefill_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[BlockId, ...]
    deadline_ms: int  # 0: none


class RowChange(NamedTuple):
    """A row is mentioned. At most one of ``append`` and ``replace`` is not empty."""

    req_index: ReqIndex
    num_scheduled_tokens: int | None = None  # None: as if it were not mentioned; 0: pause
    standing_advance: int = 0  # what it would have advanced by unmentioned
    settles: int = 0  # tokens that it was scheduled and that were not accepted; `num_computed_tokens` is set
    append: tuple[BlockId, ...] = ()
    append_at: int = 0  # place of the first appended block in the row's table
    replace: tuple[BlockId, ...] = ()  # a preempted row comes back; the two counts below are set
    num_computed_tokens: int = 0  # before this step
    num_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Everything in it is as it was when planned and stays so; ``samples`` themselves live on."""

    step: Step
    mode: PlanMode
    num_tokens: int  # scheduled over all rows
    finished: tuple[RowEnd, ...]
    preempted: tuple[RowLoss, ...]
    block_copies: tuple[BlockCopy, ...]
    new_rows: tuple[NewRow, ...]
    changes: tuple[RowChange, ...]
    turned_decode: tuple[ReqIndex, ...]  # rows that advance unmentioned from the next step on
    rows: tuple[ReqIndex, ...]  # rows that sample, ascending; shared between steps while nothing changes
    samples: tuple[Sample, ...]  # who sat in `rows` when planned
    chunks: tuple[tuple[ReqIndex, Sample], ...]  # who computes a part of a prefill, and where
    started: tuple[Request, ...]  # requests that are in a delta for the first time
    forget_prefix_cache: bool = False
    pooled_rows: tuple[ReqIndex, ...] = ()  # rows whose vector is complete with this step, ascending
    pooled: tuple[Sample, ...] = ()  # who sat in `pooled_rows` when planned
    masked_rows: tuple[ReqIndex, ...] = ()  # those of `rows` that sample under a mask, which follows
    masked: tuple[Sample, ...] = ()  # who sat in `masked_rows` when planned
    tries: Mapping[ReqIndex, int] = field(default_factory=dict)  # those of `rows` that may yield so many tokens more


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The result of one RUN step: one id per row that sampled, or several, in the order of its plan's ``rows``."""

    step: Step
    token_ids: Sequence[int]
    vectors: Sequence[Sequence[float]] = ()  # in the order of its plan's ``pooled_rows``
    logprobs: Mapping[int, object] = field(default_factory=dict)  # place in ``rows`` -> of its tokens; opaque here
    prompt_logprobs: Mapping[ReqIndex, object] = field(default_factory=dict)  # of its plan's ``chunks``; opaque here
    counts: Sequence[int] = ()  # of ``token_ids``, per row; empty: one each

    def first_of_each(self) -> Sequence[int]:
        """Return one id per row."""
        if not self.counts:
            return self.token_ids
        return [self.token_ids[end - count] for end, count in zip(accumulate(self.counts), self.counts, strict=True)]

    def of_each(self) -> list[Sequence[int]]:
        """Return the ids of each row."""
        if not self.counts:
            return [(token_id,) for token_id in self.token_ids]
        ends = accumulate(self.counts)
        return [self.token_ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]


class SampleOutput(NamedTuple):
    """What one step gave one sample: never anything past its end."""

    request: Request
    sample_index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    matched_token_id: int | None = None  # the stop id that was sampled, with STOP
    vector: Sequence[float] | None = None  # of a request that pools, its only output
    logprobs: object = None  # of ``token_ids``, and of what was dropped behind them, as it came with the result
    prompt_logprobs: object = None  # of a part of the prompt, without tokens


class ResultMismatch(ValueError):
    """A result that does not fit the plan it answers: whoever sent it has diverged."""
