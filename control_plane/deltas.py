"""Turn plans into protobuf, and results back: the only place where the two meet.

The encoder keeps both digests of the batch (PROTOCOL B7): the state digest, which follows from plans alone and travels
in every delta, and the token digest, which follows from results and is held against what ranks report. What it does
for a step grows with the rows that the plan mentions, not with those that decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.generation import PoolingChoice, SamplingChoice
from control_plane.group.batch_snapshot import BatchSnapshot, RowStanding, SnapshotUnreadable
from control_plane.scheduling.plan import NewRow, PlanMode, ResultMismatch, RowChange, StepPlan, StepTokens
from control_plane.scheduling.request import FinishReason
from control_plane.token_digest import TokenDigest
from maniple.v1 import sampling_pb2
from maniple.v1.scheduler_delta_pb2 import (
    BlockChange,
    BlockIds,
    Pooling,
    RowFinished,
    SampleInput,
    SchedulerDelta,
    StepResult,
)
from service_chassis.protocol.digest import StateDigest

_MODES = {PlanMode.RUN: SchedulerDelta.MODE_RUN, PlanMode.APPLY_ONLY: SchedulerDelta.MODE_APPLY_ONLY}
_REASONS = {
    FinishReason.STOP: RowFinished.REASON_STOP,
    FinishReason.LENGTH: RowFinished.REASON_LENGTH,
    FinishReason.ABORT: RowFinished.REASON_ABORT,
    FinishReason.DEADLINE: RowFinished.REASON_DEADLINE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPayload:
    """What a request's ``payload`` must be: what workers need of it and the scheduler does not."""

    sampling: sampling_pb2.RowSampling
    control_blob: bytes = b""
    pooling: Pooling | None = None  # set: it ends with a vector

    @property
    def num_bytes(self) -> int:
        """What it adds to the delta of each row."""
        return self.sampling.ByteSize() + len(self.control_blob)


def row_pooling(choice: PoolingChoice) -> Pooling:
    """Write out how a row becomes a vector."""
    return Pooling(kind=Pooling.KIND_MEAN if choice.is_mean else Pooling.KIND_LAST, normalize=choice.normalize)


def row_payload(sampling: SamplingChoice, control_blob: bytes = b"") -> RowPayload:
    """Write out how the rows of a request are sampled: every default resolved, ids in ascending order."""
    message = sampling_pb2.RowSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        # Where there are masks, they say so.
        min_tokens=sampling.min_tokens if sampling.constraint is None else 0,
        stop_ids=sorted(sampling.eos_ids | sampling.stop_token_ids),
        logit_bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[bias for _, bias in sampling.logit_bias],
        allowed_token_ids=sorted(sampling.allowed_token_ids),
        bad_words=[sampling_pb2.BadWord(token_ids=word) for word in sampling.bad_words],
        num_logprobs_plus_one=0 if sampling.num_logprobs is None else sampling.num_logprobs + 1,
        num_prompt_logprobs_plus_one=0 if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs + 1,
        logprobs_mode=sampling_pb2.LogprobsMode.ValueType(sampling.logprobs_mode),
    )
    return RowPayload(sampling=message, control_blob=control_blob)


def step_tokens(result: StepResult, plan: StepPlan) -> StepTokens:
    """Read a result against the plan of its own step. Raises ``ResultMismatch``."""
    if result.step != plan.step:
        raise ResultMismatch(f"result of step {result.step} read against the plan of step {plan.step}")
    counts = list(result.num_tokens)
    for row, count in zip(plan.rows, counts, strict=False):
        if not 1 <= count <= 1 + plan.tries.get(row, 0):
            raise ResultMismatch(f"step {plan.step}: row {row} yields {count} tokens, which nobody asked for")
    if len(counts or result.token_ids) != len(plan.rows) or (counts and sum(counts) != len(result.token_ids)):
        raise ResultMismatch(f"step {plan.step}: {len(result.token_ids)} tokens for {len(plan.rows)} rows that sample")
    if tuple(vector.req_index for vector in result.vectors) != plan.pooled_rows:
        rows = [vector.req_index for vector in result.vectors]
        raise ResultMismatch(f"step {plan.step}: vectors of rows {rows}, and {list(plan.pooled_rows)} complete theirs")
    vectors = [tuple(vector.values) for vector in result.vectors]
    return StepTokens(plan.step, list(result.token_ids), vectors, counts=counts)


def sample_input(plan: StepPlan, masks: Sequence[bytes]) -> SampleInput:
    """Return what the sampling of a step waits for: a mask for each of its plan's ``masked_rows``."""
    assert len(masks) == len(plan.masked_rows)
    return SampleInput(step=plan.step, req_indices=plan.masked_rows, mask_bits=b"".join(masks))


class DeltaEncoder:
    """The wire form of one group's plans, in step order, each once."""

    def __init__(self) -> None:
        """Start with an empty batch."""
        self._digest = StateDigest()
        self._tokens = TokenDigest()
        self._unanswered: deque[StepPlan] = deque()  # encoded, not yet counted in `_tokens`
        self.num_bytes = 0  # of the last delta

    @property
    def state_digest(self) -> int:
        """Digest of the batch state after the last encoded plan."""
        return self._digest.value

    def adopt(self, batch: BatchSnapshot) -> None:
        """Go on from a batch that another owner left. Once, before the first plan.

        Raises:
            SnapshotUnreadable: what the ranks report of the batch does not follow from its rows.
        """
        for row in batch.rows:
            self._digest.add(row.req_index, row.row_key)
            self._digest.compute(row.req_index, row.num_computed_tokens)
            self._digest.put_blocks(row.req_index, 0, 0, row.block_ids)
            self._digest.set_advance(row.req_index, int(row.standing is RowStanding.DECODE))
            self._tokens.enter(row.req_index, row.row_key, row.token_ids)
        for what, ours, theirs in (
            ("state", self._digest.value, batch.state_digest),
            ("token", self._tokens.value, batch.token_digest),
        ):
            if ours != theirs:
                reason = f"its rows have the {what} digest {ours:016x}, and the ranks report {theirs:016x}"
                raise SnapshotUnreadable(f"snapshot of step {batch.step}: {reason}")

    def encode(self, plan: StepPlan) -> bytes:
        """Return the plan's SchedulerDelta, serialized."""
        delta = SchedulerDelta(step=plan.step, mode=_MODES[plan.mode], forget_prefix_cache=plan.forget_prefix_cache)
        for end in plan.finished:
            delta.finished.add(req_index=end.req_index, reason=_REASONS[end.reason], num_tokens=end.num_tokens)
            self._digest.remove(end.req_index, end.num_computed_tokens)
        for loss in plan.preempted:
            delta.preempted.append(loss.req_index)
            self._digest.clear(loss.req_index, loss.num_computed_tokens)
        for copy in plan.block_copies:
            delta.block_copies.add(src_block_id=copy.src, dst_block_id=copy.dst)
        if plan.mode is PlanMode.RUN:
            # Before rows that turn decode in this step are given their advance: it counts from the next step on.
            self._digest.advance_unmentioned()
        for new in plan.new_rows:
            self._enter(delta, new)
        for change in plan.changes:
            self._change(delta, change)
        for row in plan.turned_decode:
            self._digest.set_advance(row, 1)
        delta.state_digest = self._digest.value
        delta.awaits_mask.extend(plan.masked_rows)
        self._unanswered.append(plan)
        encoded = delta.SerializeToString()
        self.num_bytes = len(encoded)
        return encoded

    def take_tokens(self, plan: StepPlan, tokens: StepTokens) -> int:
        """Count the tokens of a RUN step, in step order; return the token digest of all known tokens after it."""
        while self._unanswered and self._unanswered[0].step <= plan.step:
            self._tokens.apply(self._unanswered.popleft())
        if tokens.counts:
            self._tokens.add_several(plan.rows, tokens.of_each())
        else:
            self._tokens.add_sampled(plan.rows, tokens.token_ids)
        return self._tokens.value

    def _enter(self, delta: SchedulerDelta, new: NewRow) -> None:
        request, payload = new.sample.request, new.sample.request.payload
        assert isinstance(payload, RowPayload), "a request's payload is what row_payload returned"
        delta.new_requests.add(
            req_index=new.req_index,
            row_key=new.row_key,
            request_id=request.request_id,
            sample_index=new.sample.index,
            n=request.n,
            fork_of=new.fork_of,
            token_ids=new.token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_computed_tokens=new.num_computed_tokens,
            num_prefill_tokens=new.num_prefill_tokens,
            num_scheduled_tokens=new.num_scheduled_tokens,
            blocks=[BlockChange(replace=BlockIds(ids=new.block_ids))],
            sampling=payload.sampling,
            deadline_ms=new.deadline_ms,
            cache_namespace=request.cache_namespace,
            control_blob=payload.control_blob,
            pooling=payload.pooling,
        )
        self._digest.add(new.req_index, new.row_key)
        self._digest.compute(new.req_index, new.num_computed_tokens + new.num_scheduled_tokens)
        self._digest.put_blocks(new.req_index, 0, 0, new.block_ids)

    def _change(self, delta: SchedulerDelta, change: RowChange) -> None:
        row = change.req_index
        message = delta.changes.add(req_index=row)
        if change.num_scheduled_tokens is not None:
            message.num_scheduled_tokens = change.num_scheduled_tokens
        if change.append:
            message.blocks.add().append.ids.extend(change.append)
            self._digest.put_blocks(row, 0, change.append_at, change.append)
        elif change.replace:
            message.blocks.add().replace.ids.extend(change.replace)
            message.num_computed_tokens = change.num_computed_tokens
            message.num_prefill_tokens = change.num_prefill_tokens
            self._digest.compute(row, change.num_computed_tokens)
            self._digest.put_blocks(row, 0, 0, change.replace)
        if change.settles:
            message.num_computed_tokens = change.num_computed_tokens
            self._digest.compute(row, -change.settles)
        if change.num_scheduled_tokens is not None:
            self._digest.compute(row, change.num_scheduled_tokens - change.standing_advance)
