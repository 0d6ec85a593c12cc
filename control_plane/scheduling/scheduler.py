"""Decide what each step computes.

House rules of this file:
- ``schedule()`` is the policy and fits a screen. Books are kept elsewhere: blocks in
  ``Tables``, rows in ``Batch``, queues in ``WaitingRoom``.
- A steady step (decode rows, nothing due) visits no row and no waiting request. Nothing here loops over either.
- What a plan says is final: it is encoded and sent as soon as it is returned. What has to be said later (rows that
  ended, blocks that were taken) is kept until the next plan; the blocks themselves may be handed out again at once,
  since a delta gives back before it takes (PROTOCOL B3).
- ``_end`` is the only way out for a sample, whatever the reason.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from control_plane.scheduling.adoption import AdoptedRequest, AdoptedRow, prompt_is_done
from control_plane.scheduling.batch import NOBODY, Batch, order_of
from control_plane.scheduling.block_events import BlockEvent, BlockStored
from control_plane.scheduling.limits import SchedulerLimits
from control_plane.scheduling.order_queue import OrderQueue
from control_plane.scheduling.plan import (
    BlockCopy,
    NewRow,
    PlanMode,
    ResultMismatch,
    RowChange,
    RowEnd,
    RowLoss,
    SampleOutput,
    StepPlan,
    StepTokens,
)
from control_plane.scheduling.request import FinishReason, Order, Refusal, RefusalKind, Request, Sample, SampleState
from control_plane.scheduling.speculation import Speculation
from control_plane.scheduling.tables import Place, Tables
from control_plane.scheduling.waiting_room import WaitingRoom
from service_chassis.ids import BlockId, ReqIndex, RequestId, Step

__all__ = ["Scheduler", "SchedulerLimits"]

_MAX_UINT32 = 2**32 - 1


def random_row_key() -> int:
    """Draw a row key that no other use of a row has had, in this tenure or another."""
    return secrets.randbits(64)


@dataclass(slots=True)
class _Draft:
    """A plan while it is made."""

    step: Step
    now: float
    preempted: bool = False  # some sample lost its blocks in this step
    new_row_bytes: int = 0
    result_entries: int = 0
    block_copies: list[BlockCopy] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    changes: dict[ReqIndex, RowChange] = field(default_factory=dict)
    turned_decode: list[ReqIndex] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    chunks: list[tuple[ReqIndex, Sample]] = field(default_factory=list)
    pooled: list[Sample] = field(default_factory=list)
    tries: dict[ReqIndex, int] = field(default_factory=dict)


class Scheduler:
    """All requests of one group. Pure: no clock, no I/O; one caller at a time."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        enable_prefix_caching: bool = True,
        first_step: int = 1,
        key_source: Callable[[], int] = random_row_key,
    ) -> None:
        """Start with nothing.

        Args:
            limits: of the group; fixed for its life.
            enable_prefix_caching: let requests share the blocks of equal prompt heads.
            first_step: number of the first plan.
            key_source: returns a row key that was never used before.
        """
        self.limits = limits
        self.step = Step(first_step)  # of the next plan
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache by requests that started
        self.prefix_hits = 0  # tokens found
        self._key_source = key_source
        self._tables = Tables(limits.num_blocks, limits.block_size, caching=enable_prefix_caching)
        self._pool = self._tables.pool
        self._batch = Batch(limits.max_num_seqs, limits.block_size)
        self._speculation = Speculation(limits.num_speculative_tokens, self._batch, self._tables, limits.block_size)
        # A row that has the whole cache to itself can compute so many tokens and sample one more.
        self._max_known_tokens = min(limits.max_model_len, self._pool.num_total * limits.block_size + 1)
        self._requests: dict[RequestId, Request] = {}  # the living
        self._num_added = 0
        self._num_unstarted = 0
        self._room = WaitingRoom()
        self._deadlines: OrderQueue[Request] = OrderQueue()
        self._refused: tuple[Sample, int] | None = None  # who found no room, and how many blocks were available then
        # Not yet in a plan:
        self._ended: list[RowEnd] = []
        self._lost: dict[ReqIndex, RowLoss] = {}
        self._forget = False
        self._pooled: list[Sample] = []  # whose vector is complete with the plan before: their rows have no more to do
        # Not yet answered:
        self._runs: deque[StepPlan] = deque()
        self._applies: deque[Step] = deque()
        self._completed = first_step - 1

    # --- what others may know

    @property
    def num_running(self) -> int:
        """Samples that hold blocks."""
        return self._batch.num_resident

    @property
    def num_waiting(self) -> int:
        """Samples that wait: for a row, for blocks, for their first sample, for the end of a pause."""
        return len(self._room)

    def num_waiting_tokens(self) -> int:
        """Tokens to be computed before what waits can sample, were nothing of it cached. O(waiting)."""
        # The other samples of a request fork from its first one.
        return sum(
            sample.num_prefill_tokens
            for sample in self._room
            if not sample.index or sample.state is SampleState.PREEMPTED
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks of unknown contents that no row holds."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no row holds and that may be hit or evicted."""
        return self._pool.num_cached

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens that were tried ahead and accepted: as many steps of a row less."""
        return self._speculation.num_accepted

    @property
    def num_outstanding(self) -> int:
        """Steps without an answer."""
        return len(self._runs) + len(self._applies)

    def has_work(self) -> bool:
        """Some sample still has to be computed. ``schedule`` may return None all the same."""
        return bool(self.num_running or self.num_waiting)

    def has_unflushed(self) -> bool:
        """Something ended or was taken that no delta has said so of yet."""
        return bool(self._ended or self._lost or self._forget)

    def requests(self) -> list[Request]:
        """Return the living, in the order in which they came."""
        return list(self._requests.values())

    def num_computed_tokens(self, sample: Sample) -> int:
        """Tokens of a living sample in the cache once all planned steps are done."""
        return self._batch.num_computed_tokens(sample)

    def cached_prefix_tokens(self, token_ids: Sequence[int], cache_namespace: bytes = b"") -> int:
        """Return how many leading tokens of a prompt are in the prefix cache now. Takes nothing, changes nothing.

        What it costs grows with the hit, not with the prompt.
        """
        return self._tables.num_cached_tokens(token_ids, cache_namespace, self._completed)

    # --- requests come and go

    def refusal(self, request: Request) -> Refusal | None:
        """Say why ``request`` cannot be added, or None. Changes nothing."""
        limits, num_prompt_tokens = self.limits, request.num_known_tokens()
        if request.request_id in self._requests:
            return Refusal(RefusalKind.DUPLICATE, f"request id {request.request_id!r} is running")
        if num_prompt_tokens >= limits.max_model_len:
            return Refusal(
                RefusalKind.TOO_LONG,
                f"the prompt has {num_prompt_tokens} tokens, it must be below max_model_len {limits.max_model_len}",
            )
        num_blocks = math.ceil(num_prompt_tokens / limits.block_size)
        if num_blocks > self._pool.num_total:
            return Refusal(
                RefusalKind.NEEDS_MORE_BLOCKS,
                f"the prompt needs {num_blocks} KV blocks; there are {self._pool.num_total}",
            )
        # What was computed elsewhere already is not turned away: it was let in when it came.
        if self._num_unstarted >= limits.max_num_waiting and not request.outputs:
            return Refusal(RefusalKind.QUEUE_FULL, f"{self._num_unstarted} requests wait already")
        return None

    def add(self, request: Request) -> None:
        """Queue a request for which ``refusal`` is None."""
        self._take_in(request)
        request.prompt_done = request.samples[0].state is SampleState.FINISHED
        self._num_unstarted += 1
        self._room.enter(request)

    def adopt(self, batch: Sequence[AdoptedRequest], cached: Sequence[tuple[BlockId, bytes]]) -> None:
        """Go on with what another owner left running. Once, before anything else; the first plan follows its last step.

        Args:
            batch: in order of arrival.
            cached: blocks that no row holds, with their chain hashes; the next to be evicted first.
        """
        assert not self._num_added
        rows = [row for adopted in batch for row in adopted.rows]
        self._batch.reserve({row.req_index for row in rows})
        known = cached if self._tables.caching else ()
        self._pool.adopt([row.block_ids for row in rows], known, self._completed)
        for adopted in batch:
            request = adopted.request
            self._take_in(request)
            request.started = True
            request.prompt_done = prompt_is_done(adopted)
            for row in adopted.rows:
                self._seat(request.samples[row.sample_index], row)
            self._room.enter(request)
            for row in adopted.rows:
                if row.end is not None:
                    sample = request.samples[row.sample_index]
                    del sample.token_ids[len(request.prompt_token_ids) + row.end.num_output_tokens :]
                    self._end(sample, row.end.reason)

    def _seat(self, sample: Sample, row: AdoptedRow) -> None:
        """Put a sample back where another owner's scheduler had it."""
        sample.req_index, sample.row_key = row.req_index, row.row_key
        sample.num_prefill_tokens = len(sample.token_ids)
        sample.resident_since = sample.decode_since = self._completed
        if row.state is SampleState.PREEMPTED:
            sample.state = row.state
            return  # it queues with the others
        sample.block_ids = list(row.block_ids)
        if row.is_void:
            # Past what it knows it has computed padding. It comes back with what it knows, as if it were preempted.
            self._tables.note_computed(sample, row.num_computed_tokens, Step(self._completed))
            self._tables.release(sample)
            self._lost[row.req_index] = RowLoss(row.req_index, row.num_computed_tokens)
            sample.state = SampleState.PREEMPTED
            return
        num_computed_tokens = row.num_computed_tokens
        if row.state is SampleState.DECODE:
            # What it tried ahead in vain is counted, too, until we say better.
            num_computed_tokens = min(num_computed_tokens, len(sample.token_ids) - 1)
            sample.unsettled = row.num_computed_tokens - num_computed_tokens
        self._batch.begin_prefill(sample, num_computed_tokens)
        self._tables.note_computed(sample, num_computed_tokens, Step(self._completed))
        if row.state is SampleState.DECODE:
            self._batch.begin_decode(sample, in_this_step=False)
            self._speculation.enter(sample)

    def limit_of(self, request: Request) -> int:
        """Return the number of known tokens, prompt included, with which a sample of ``request`` ends at the latest."""
        return min(len(request.prompt_token_ids) + request.max_tokens, self._max_known_tokens)

    def _take_in(self, request: Request) -> None:
        assert request.request_id not in self._requests
        self._num_added += 1
        request.order = (request.priority, request.arrival, self._num_added, 0)
        limit = self.limit_of(request)
        request.samples = tuple(Sample(request, index, limit) for index in range(request.n))
        request.num_live = sum(sample.state is SampleState.WAITING for sample in request.samples)
        self._requests[request.request_id] = request
        if request.deadline is not None:
            self._deadlines.push((request.deadline, self._num_added), request)

    def finish(self, request_id: RequestId, reason: FinishReason, *, sample_index: int | None = None) -> bool:
        """End a request, or one of its samples, from outside; idempotent.

        Blocks are free and the id may be used again when this returns. Tokens that are still computed are discarded.

        Returns:
            False if there was nothing (left) to end.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        samples = request.samples if sample_index is None else request.samples[sample_index : sample_index + 1]
        living = [sample for sample in samples if sample.state is not SampleState.FINISHED]
        for sample in living:
            self._end(sample, reason)
        return bool(living)

    def expired(self, now: float) -> list[RequestId]:
        """Return the requests whose deadline has passed, each once: whoever calls ends them. O(returned)."""
        expired = []
        while (request := self._deadlines.first()) is not None and request.deadline is not None:
            if request.deadline > now:
                break
            self._deadlines.discard(request)
            expired.append(request.request_id)
        return expired

    def next_deadline(self) -> float | None:
        """Return the earliest deadline that ``expired`` did not return yet."""
        request = self._deadlines.first()
        return None if request is None else request.deadline

    def set_paused(self, request_id: RequestId, paused: bool) -> bool:
        """Hold a request where it is, with its rows and blocks, or let it go on. False: unknown.

        A held decode row is mentioned with 0 tokens in every step; a held prefill is not mentioned.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.paused = paused
        for sample in request.samples:
            if sample.state is SampleState.DECODE:
                self._batch.set_paused(sample, paused)
        if not paused:
            self._room.queue_held(request)
        return True

    def forget_prefix_cache(self) -> None:
        """Forget all blocks that no row holds; the next delta says so to the workers."""
        self._pool.forget_cached()
        self._forget = True

    def clear_cache(self) -> None:
        """Take the blocks of every sample and forget what all blocks hold; the next delta says so.

        No step is outstanding. All that run come back as after any preemption, computed anew.
        """
        assert not self.num_outstanding
        draft = _Draft(self.step, 0.0)
        for sample in list(self._batch.resident()):
            self._preempt(draft, sample)
        self._pool.clear()
        self._forget = True

    # --- for those who follow what is cached

    def record_block_events(self, wanted: bool) -> None:
        """Keep events of blocks from now on, or no more."""
        self._pool.record_events(wanted)

    def take_block_events(self) -> list[BlockEvent]:
        """Return what happened to named blocks since the last call, in order. Empty unless it is recorded."""
        return self._pool.take_events()

    def stored_blocks(self) -> tuple[list[BlockStored], int]:
        """Return every named block, parents before children, and how many there are of unknown contents. O(named)."""
        return self._pool.stored()

    # --- steps

    def schedule(self, now: float) -> StepPlan | None:
        """Plan a RUN step; None if nothing can be computed now, or enough steps are outstanding.

        Decode rows go first and are not visited. Then prefill chunks, half-done, preempted and new samples alike, by
        priority and age within the token budget. A sample gets the blocks of its whole prefill when it is admitted.
        """
        if self.num_outstanding >= self.limits.max_steps_in_flight:
            return None
        draft = _Draft(self.step, now)
        self._room.admit_followers()
        self._serve_due(draft)
        budget = self.limits.max_num_batched_tokens - self._batch.num_advancing
        for sample in self._batch.prefilling():
            budget -= self._admit(draft, budget, ahead_of=sample.order)
            budget -= self._continue_prefill(draft, sample, budget)
        budget -= self._admit(draft, budget)
        if self._speculation:
            draft.tries = self._speculation.plan(draft.changes, draft.step, budget)
            budget -= sum(draft.tries.values())
        num_tokens = self.limits.max_num_batched_tokens - budget
        return self._emit(draft, PlanMode.RUN, num_tokens) if num_tokens else None

    def flush(self) -> StepPlan | None:
        """Plan an APPLY_ONLY step that says what ended; None if there is none, or enough steps are outstanding."""
        if not self.has_unflushed() or self.num_outstanding >= self.limits.max_steps_in_flight:
            return None
        return self._emit(_Draft(self.step, 0.0), PlanMode.APPLY_ONLY, 0)

    def apply(self, result: StepTokens) -> list[SampleOutput]:
        """Take the result of the oldest outstanding RUN step and say what each sample got from it.

        Tokens past the end of a sample are dropped. A sample that meets a stop id or its limit ends here.

        Raises:
            ResultMismatch: the result does not answer that step; nothing was changed.
        """
        plan = self._runs[0] if self._runs else None
        if plan is None or result.step != plan.step:
            raise ResultMismatch(f"result of step {result.step}, due is {'none' if plan is None else plan.step}")
        if len(result.counts or result.token_ids) != len(plan.samples):
            raise ResultMismatch(f"step {plan.step}: {len(result.token_ids)} tokens for {len(plan.samples)} rows")
        if len(result.vectors) != len(plan.pooled):
            raise ResultMismatch(f"step {plan.step}: {len(result.vectors)} vectors for {len(plan.pooled)} rows")
        self._runs.popleft()
        self._completed = plan.step
        outputs: list[SampleOutput] = []
        for row, sample in plan.chunks if result.prompt_logprobs else ():
            told = result.prompt_logprobs.get(row)
            if told is not None and sample.state is not SampleState.FINISHED:
                outputs.append(SampleOutput(sample.request, sample.index, (), prompt_logprobs=told))
        outputs += self._take_several(plan, result) if plan.tries else self._take_one_each(plan, result)
        for sample, vector in zip(plan.pooled, result.vectors, strict=True):
            if sample.state is not SampleState.FINISHED:
                outputs.append(SampleOutput(sample.request, sample.index, (), FinishReason.STOP, vector=vector))
                self._end(sample, FinishReason.STOP)
        return outputs

    def _take_one_each(self, plan: StepPlan, result: StepTokens) -> list[SampleOutput]:
        """Take the one token that each row of a step yields.

        The one loop over all rows that a steady step has, so it is written for speed: 0.25 us a row.
        """
        outputs: list[SampleOutput] = []
        add, new = outputs.append, tuple.__new__  # three times as quick as calling SampleOutput
        block_size, of_tokens, ended = self.limits.block_size, result.logprobs, SampleState.FINISHED
        told = None
        for place, (sample, token_id) in enumerate(zip(plan.samples, result.token_ids, strict=True)):
            if sample.state is ended:
                continue
            known = sample.token_ids
            num_known = len(known)
            if not num_known % block_size:
                self._note_decoded(sample, plan.step)
            known.append(token_id)
            if of_tokens:
                told = of_tokens.get(place)
            if token_id in sample.stop_ids and num_known >= sample.stop_floor:
                reason, matched = FinishReason.STOP, token_id
            elif num_known + 1 == sample.limit:
                reason, matched = FinishReason.LENGTH, None
            else:
                add(new(SampleOutput, (sample.request, sample.index, (token_id,), None, None, None, told, None)))
                continue
            add(SampleOutput(sample.request, sample.index, (token_id,), reason, matched, logprobs=told))
            self._end(sample, reason)
        return outputs

    def _take_several(self, plan: StepPlan, result: StepTokens) -> list[SampleOutput]:
        """Take the tokens of a step in which rows tried some ahead."""
        outputs = []
        rows = zip(plan.rows, plan.samples, result.of_each(), strict=True)
        for place, (row, sample, token_ids) in enumerate(rows):
            if sample.state is SampleState.FINISHED:
                continue
            if row in plan.tries:
                self._speculation.take(sample, len(token_ids) - 1)
            reason, matched, num_before = None, None, len(sample.token_ids)
            for num_known, token_id in enumerate(token_ids, num_before):
                if not num_known % self.limits.block_size:
                    self._note_decoded(sample, plan.step)
                sample.token_ids.append(token_id)
                if token_id in sample.stop_ids and num_known >= sample.stop_floor:
                    reason, matched = FinishReason.STOP, token_id
                elif num_known + 1 == sample.limit:
                    reason = FinishReason.LENGTH
                if reason is not None:
                    break
            kept = tuple(sample.token_ids[num_before:])
            told = result.logprobs.get(place)
            outputs.append(SampleOutput(sample.request, sample.index, kept, reason, matched, logprobs=told))
            if reason is not None:
                self._end(sample, reason)
        return outputs

    def acknowledge(self, step: Step) -> None:
        """Every rank has accepted all steps up to ``step``: its APPLY_ONLY steps are outstanding no more."""
        while self._applies and self._applies[0] <= step:
            self._applies.popleft()

    # --- the parts of schedule()

    def _serve_due(self, draft: _Draft) -> None:
        """End rows whose last token or vector is planned; then give rows at a block boundary their next block."""
        for sample in self._pooled:
            if sample.state is SampleState.PREFILL:  # else its result was faster, or it was ended
                self._leave(sample, FinishReason.STOP, sample.num_prefill_tokens)
                sample.state = SampleState.LEFT
        self._pooled.clear()
        growing = []
        for sample in self._batch.due():
            if self._batch.num_computed_tokens(sample) == sample.limit - 1:
                self._leave(sample, FinishReason.LENGTH, sample.limit)
                sample.state = SampleState.LEFT
            else:
                growing.append(sample)
        for sample in sorted(growing, key=order_of):
            while sample.state is SampleState.DECODE and not self._pool.num_available:
                victim = self._batch.victim()
                assert victim is not None
                self._preempt(draft, victim)
            if sample.state is SampleState.DECODE:
                place = len(sample.block_ids)
                blocks = self._tables.grow(sample)
                draft.changes[sample.req_index] = RowChange(sample.req_index, append=blocks, append_at=place)
                self._batch.file(sample)

    def _preempt(self, draft: _Draft, sample: Sample) -> None:
        """Take a sample's blocks. It keeps its row and its tokens, and computes them again when there is room."""
        draft.preempted = True
        self.num_preemptions += 1
        if sample.state is SampleState.DECODE:
            # Tokens that are still on their way count: the workers know them when they need them (PROTOCOL B5).
            sample.num_prefill_tokens = self._batch.num_computed_tokens(sample) + 1
        draft.changes.pop(sample.req_index, None)
        self._lost[sample.req_index] = RowLoss(sample.req_index, self._batch.take_out(sample))
        self._tables.release(sample)
        sample.state = SampleState.PREEMPTED
        self._room.queue(sample)

    def _continue_prefill(self, draft: _Draft, sample: Sample, budget: int) -> int:
        """Give a half-done prefill its next chunk; return the tokens it takes."""
        num_tokens = self._fitting(draft, sample, min(sample.num_prefill_tokens - sample.offset, budget))
        if num_tokens and not sample.request.paused and self._has_room_for_vector(draft, sample):
            self._compute(draft, sample, num_tokens)
            draft.changes[sample.req_index] = RowChange(sample.req_index, num_tokens)
            return num_tokens
        return 0

    def _admit(self, draft: _Draft, budget: int, *, ahead_of: Order | None = None) -> int:
        """Let preempted and waiting samples in, in order, while there is room; return the tokens they take.

        The first that finds no room holds up all behind it, or a large one would starve. And nobody is let in by a step
        that preempted: the blocks just taken would go straight back, and be taken again.
        """
        used = 0
        while used < budget and not draft.preempted:
            sample = self._room.first(has_free_row=self._batch.num_free_rows > 0)
            if sample is None or (ahead_of is not None and sample.order > ahead_of):
                break
            num_bytes = _new_row_bytes(sample)
            if draft.new_rows and draft.new_row_bytes + num_bytes > self.limits.max_new_row_bytes:
                break  # the next step's delta has room
            if not self._has_room_for_vector(draft, sample) or not self._fitting(draft, sample, 1):
                break
            place = self._find_place(sample, draft)
            if place is None:
                break
            draft.new_row_bytes += num_bytes
            used += self._let_in(draft, sample, place, budget - used)
        return used

    def _has_room_for_vector(self, draft: _Draft, sample: Sample) -> bool:
        """Say whether this step's result has room for what ``sample`` may add to it."""
        return not sample.request.pools or len(draft.pooled) < self.limits.max_vectors

    def _fitting(self, draft: _Draft, sample: Sample, num_tokens: int) -> int:
        """Return how many of these tokens of a prefill this step's result has room for."""
        entries = sample.request.result_entries
        if not entries:
            return num_tokens
        return min(num_tokens, (self.limits.max_result_entries - draft.result_entries) // entries)

    def _find_place(self, sample: Sample, draft: _Draft) -> Place | None:
        """Take the blocks for the whole prefill of ``sample``; None if there are too few.

        One more block must stay available for every sample that runs, or the next steps would preempt.
        """
        available = self._pool.num_available
        # While no more blocks are available than when it was refused, looking again (O(prompt)) would find the same.
        if self._refused is not None and self._refused[0] is sample and available <= self._refused[1]:
            return None
        place = self._tables.find_place(
            sample, self._parent(sample, draft.step), spare=self._batch.num_resident, completed=self._completed
        )
        self._refused = (sample, available) if place is None else None
        return place

    def _parent(self, sample: Sample, step: Step) -> Sample | None:
        """Return a sample whose prompt ``sample`` can share: it decodes since before this step."""
        # One that came with output of its own shares with the others what the prefix cache holds.
        if sample.state is SampleState.WAITING and len(sample.request.samples) > 1 and not sample.num_output_tokens:
            for other in sample.request.samples:
                if other.state is SampleState.DECODE and other.decode_since < step:
                    return other
        return None

    def _let_in(self, draft: _Draft, sample: Sample, place: Place, budget: int) -> int:
        """Put a sample into the batch at ``place``; return the tokens it takes of this step."""
        num_tokens = self._fitting(draft, sample, min(sample.num_prefill_tokens - place.num_computed_tokens, budget))
        is_new = sample.state is SampleState.WAITING
        self._room.remove(sample)
        if is_new:
            self._batch.seat(sample, self._key_source())
            self._note_start(draft, sample, place)
        sample.block_ids = place.block_ids
        sample.num_registered = place.num_registered
        sample.resident_since = draft.step
        self._batch.begin_prefill(sample, place.num_computed_tokens)
        self._compute(draft, sample, num_tokens)
        if is_new:
            draft.block_copies += place.block_copies
            draft.new_rows.append(
                NewRow(
                    req_index=sample.req_index,
                    row_key=sample.row_key,
                    sample=sample,
                    fork_of=place.parent.req_index if place.parent is not None else None,
                    token_ids=tuple(sample.token_ids) if place.parent is None else (),
                    num_computed_tokens=place.num_computed_tokens,
                    num_prefill_tokens=sample.num_prefill_tokens,
                    num_scheduled_tokens=num_tokens,
                    block_ids=tuple(place.block_ids),
                    deadline_ms=_milliseconds_left(sample.request.deadline, draft.now),
                )
            )
        else:
            draft.changes[sample.req_index] = RowChange(
                sample.req_index,
                num_tokens,
                replace=tuple(place.block_ids),
                num_computed_tokens=place.num_computed_tokens,
                num_prefill_tokens=sample.num_prefill_tokens,
            )
        return num_tokens

    def _note_start(self, draft: _Draft, sample: Sample, place: Place) -> None:
        """Count a sample that enters its first delta."""
        request = sample.request
        if place.parent is None and self._tables.caching and not request.skip_reading_prefix_cache:
            self.prefix_queries += sample.num_prefill_tokens
            self.prefix_hits += place.num_computed_tokens
        if not request.started:
            request.started = True
            request.num_cached_tokens = place.num_computed_tokens
            self._num_unstarted -= 1
            draft.started.append(request)

    def _compute(self, draft: _Draft, sample: Sample, num_tokens: int) -> None:
        """Count a chunk of a prefill as computed by this step; after the last one the sample decodes, or has pooled."""
        sample.offset += num_tokens
        draft.chunks.append((sample.req_index, sample))
        draft.result_entries += num_tokens * sample.request.result_entries
        self._tables.note_computed(sample, sample.offset, draft.step)
        if sample.offset < sample.num_prefill_tokens:
            return
        if sample.request.pools:
            draft.pooled.append(sample)
        else:
            sample.decode_since = draft.step
            self._batch.begin_decode(sample)
            self._speculation.enter(sample)
            self._room.note_prompt_done(sample)
            draft.turned_decode.append(sample.req_index)

    def _note_decoded(self, sample: Sample, step: Step) -> None:
        """Before the token that ``step`` sampled is added: all known tokens are computed, and fill whole blocks."""
        # Not if the step belongs to a stay in the batch that a preemption ended: the blocks are others now.
        if sample.state is SampleState.DECODE and step >= sample.resident_since:
            self._tables.note_computed(sample, len(sample.token_ids), step)

    def _emit(self, draft: _Draft, mode: PlanMode, num_tokens: int) -> StepPlan:
        """Turn a draft, and what ended since the plan before, into a plan; it is outstanding from now on."""
        sampling = self._batch.sampling() if mode is PlanMode.RUN else NOBODY
        pooled = sorted(draft.pooled, key=lambda sample: sample.req_index)
        changes = list(draft.changes.values())
        if mode is PlanMode.RUN:
            changes += [RowChange(row, 0, standing_advance=1) for row in self._batch.paused_rows()]
            self._batch.advance()
        plan = StepPlan(
            step=draft.step,
            mode=mode,
            num_tokens=num_tokens,
            finished=tuple(self._ended),
            preempted=tuple(self._lost.values()),
            block_copies=tuple(draft.block_copies),
            new_rows=tuple(draft.new_rows),
            changes=tuple(changes),
            turned_decode=tuple(draft.turned_decode),
            rows=sampling.rows,
            samples=sampling.samples,
            masked_rows=sampling.masked_rows,
            masked=sampling.masked,
            chunks=tuple(draft.chunks),
            started=tuple(draft.started),
            forget_prefix_cache=self._forget,
            pooled_rows=tuple(sample.req_index for sample in pooled),
            pooled=tuple(pooled),
            tries=draft.tries,
        )
        self._ended.clear()
        self._lost.clear()
        self._pooled += pooled
        self._forget = False
        self.step = Step(self.step + 1)
        if mode is PlanMode.RUN:
            self._runs.append(plan)
        else:
            self._applies.append(plan.step)
        return plan

    # --- samples come to an end

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        """End a sample that has not ended: the only way out, whatever the reason and wherever it is."""
        request = sample.request
        if sample.state in (SampleState.PREFILL, SampleState.DECODE, SampleState.PREEMPTED):
            self._leave(sample, reason, len(sample.token_ids))
        else:
            self._room.remove(sample)
        sample.state = SampleState.FINISHED
        self._room.note_prompt_done(sample)
        request.num_live -= 1
        if not request.num_live:
            del self._requests[request.request_id]
            self._deadlines.discard(request)
            self._num_unstarted -= not request.started

    def _leave(self, sample: Sample, reason: FinishReason, num_tokens: int) -> None:
        """Give back a sample's row and blocks; the next plan says so."""
        if sample.state is SampleState.PREEMPTED:
            self._room.remove(sample)
            lost = self._lost.pop(sample.req_index, None)  # in the same plan its preemption need not be said
            num_computed_tokens = lost.num_computed_tokens if lost is not None else 0
        else:
            num_computed_tokens = self._batch.take_out(sample)
            self._tables.release(sample)
        self._ended.append(RowEnd(self._batch.unseat(sample), reason, num_tokens, num_computed_tokens))

    def check_integrity(self) -> None:
        """Raise AssertionError, with a sentence, where the books do not agree. O(everything): tests and idle time."""
        living = [s for r in self._requests.values() for s in r.samples if s.state is not SampleState.FINISHED]
        by_state = {state: {s for s in living if s.state is state} for state in SampleState}
        resident = set(self._batch.resident())
        assert by_state[SampleState.PREFILL] | by_state[SampleState.DECODE] == resident, "residents differ"
        assert by_state[SampleState.WAITING] | by_state[SampleState.PREEMPTED] == set(self._room), "waiting differ"
        self._tables.check_integrity(resident)
        self._batch.check_integrity()
        self._room.check_integrity()
        seated = {s.req_index for s in living if s.req_index >= 0}
        assert len(seated) + self._batch.num_free_rows == self.limits.max_num_seqs, "a row is lost"
        assert not any(s.block_ids for s in living if s not in resident), "a sample without a place holds blocks"
        assert self._num_unstarted == sum(not r.started for r in self._requests.values()), "unstarted differ"
        assert self.has_work() or self._pool.num_available == self._pool.num_total, "idle, and blocks are in use"


def _new_row_bytes(sample: Sample) -> int:
    """Return what a sample that enters adds to the delta at most: an id, of a token or a block, has up to 5 bytes."""
    if sample.state is not SampleState.WAITING:
        return 0  # its row is there
    return sample.request.payload_bytes + 10 * len(sample.token_ids)


def _milliseconds_left(deadline: float | None, now: float) -> int:
    # The field has 32 bits; whoever waits longer than its 49 days is answered by the clock here, not by the workers.
    return 0 if deadline is None else max(1, math.ceil(min((deadline - now) * 1000, _MAX_UINT32)))
