"""Run one group: plan, send, await, publish.

House rules: one loop owns the scheduler and the live requests; everything runs in one event loop, and no method waits
for a client or a rank. A delta goes out before the tokens of the step before it become text. Whatever ends a request
early (cancelled stream, passed deadline, ``abort``, drain, lost group) goes through ``_finish``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import structlog

from control_plane.admission import check_workers_can, scheduled_request, unwritable, written_payload
from control_plane.caller_share import Held
from control_plane.client_errors import error_of_loss, error_of_refusal
from control_plane.constrained_requests import ConstrainedRequests
from control_plane.deltas import DeltaEncoder, sample_input
from control_plane.departure import Departure
from control_plane.dormancy import Dormancy
from control_plane.engine_status import EngineLimits, EngineStatus, RequestIds
from control_plane.generation import Cursor, FinishReason, Generation
from control_plane.generation_stream import GenerationStream
from control_plane.group.batch_snapshot import BatchSnapshot
from control_plane.group.loss import LossKind, LossReason
from control_plane.group.worker_group import OUTPUT_RANK, WorkerGroup
from control_plane.handover import NextOwner
from control_plane.inheritance import Inheritance
from control_plane.live_request import LiveRequest, resumed_stream
from control_plane.live_requests import LiveRequests
from control_plane.pause import PAUSE_REASONS, PauseMode
from control_plane.rates import Rate
from control_plane.routing import Candidate
from control_plane.scheduling import request as scheduled
from control_plane.scheduling.block_events import BlockEvent, BlockStored
from control_plane.scheduling.plan import PlanMode, ResultMismatch, SampleOutput, StepPlan
from control_plane.scheduling.scheduler import Scheduler
from control_plane.step_results import PromptPart, StepResults
from control_plane.text.tokenizer import Tokenizer
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta, StepResult
from service_chassis.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    ManipleError,
    NotBuilt,
    NotReady,
)
from service_chassis.ids import RequestId, Step
from service_chassis.protocol.logprobs import Logprobs

if TYPE_CHECKING:
    from control_plane.structured_output.compiler import GrammarCompiler

log = structlog.get_logger(__name__)

# Rows that ended while nothing else runs are told to the workers within this time (PROTOCOL B2).
FLUSH_AFTER_S = 0.05
# How many groups a request may lose under it and still go on in another. One that was in three when they were lost may
# be what loses them, and would take down one after another.
MAX_MOVES = 2

_REASONS = {
    scheduled.FinishReason.STOP: FinishReason.STOP,
    scheduled.FinishReason.LENGTH: FinishReason.LENGTH,
    scheduled.FinishReason.ABORT: FinishReason.ABORT,
}


class Engine:
    """The requests of one group, from admission to their last event or until another group takes them over."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        group: WorkerGroup,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        model: str,
        ids: RequestIds | None = None,
        adopted: BatchSnapshot | None = None,
        survivors: BatchSnapshot | None = None,
        grammars: GrammarCompiler | None = None,
        resume_grace_s: float = 30.0,
        outlived_by_workers: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a group that lives and a fresh scheduler of the same limits. ``run`` starts it.

        Args:
            scheduler: its first step is the group's next.
            group: its callbacks are set here.
            tokenizer: of the model.
            limits: of the group.
            model: its name, for people.
            ids: those of the control plane, where it has other engines beside this one or had one before.
            adopted: the batch that another owner left running in the group.
            survivors: what was left of another owner's batch when its group was lost, to be computed anew here.
            grammars: of the control plane; None: no output can be made to match anything.
            resume_grace_s: how long an adopted request waits for its client.
            outlived_by_workers: they go on without us, so that another control plane may continue every request.
            clock: of deadlines.

        Raises:
            SnapshotUnreadable: the batch is not what the ranks report of it.
        """
        self.limits = limits
        self.now = clock
        self.on_lost: Callable[[LossReason], None] = lambda loss: None
        # Asked for each request when the group is lost: True if another engine has taken it.
        self.hand_over: Callable[[LiveRequest, scheduled.Request], bool] = lambda live, request: False
        self._scheduler = scheduler
        self._encoder = DeltaEncoder()
        self._step_results = StepResults()
        self._group = group
        self._tokenizer = tokenizer
        self._model = model
        self.outlived_by_workers = outlived_by_workers
        self._started_at = clock()
        self._ids = ids if ids is not None else RequestIds()  # finished less than a minute ago
        self._live = LiveRequests(self._ids)
        self._plans: dict[Step, StepPlan] = {}  # RUN steps without a result
        self._constrained = ConstrainedRequests(
            grammars,
            vocab_size=limits.vocab_size,
            send=lambda plan, masks: group.send_sample_input(sample_input(plan, masks)),
            hold=self._hold,
            fail=lambda request_id, error: self._finish(request_id, scheduled.FinishReason.ABORT, error),
        )
        self._num_arrived = 0  # counted on across owners of the group
        self._departure = Departure(group, self._live, end=self._end, abort_all=self.abort_all)
        self._pause: PauseMode | None = None  # set: no new steps, but for those that let requests finish
        self._num_holds = 0  # no new steps, whatever becomes of a pause; see without_steps
        self._num_calls = 0  # nothing is sent at all; see _undisturbed
        self._has_settled = asyncio.Event()  # nothing is outstanding, or a pause ended; see stand_still
        self.dormancy = Dormancy(group, undisturbed=self._undisturbed, on_change=self._on_sleep_or_wake)
        self._results: deque[StepResult] = deque()  # arrived, not applied; at most one per step in flight
        self._outputs: list[SampleOutput] = []  # applied, not told to the clients
        self._has_failed = False
        self._wake = asyncio.Event()
        self._flush_at: float | None = None
        self._block_listener: Callable[[Sequence[BlockEvent]], None] | None = None
        self._closed_reason = ""  # why no new requests are accepted
        self._readiness: list[Callable[[bool], None]] = []
        self._prompt_rate, self._output_rate, self._step_rate = Rate(), Rate(), Rate()
        group.on_result = self._on_result
        group.on_accepted = self._on_accepted
        group.on_lost = self.fail
        group.on_health = lambda healthy, reason: self._tell_readiness()
        if adopted is not None or survivors is not None:
            inheritance = Inheritance(
                scheduler=scheduler,
                encoder=self._encoder,
                live=self._live,
                constrained=self._constrained,
                ids=self._ids,
                tokenizer=tokenizer,
                end=self._end,
                now=clock(),
                resume_grace_s=resume_grace_s,
            )
            if adopted is not None:
                self._num_arrived = inheritance.adopt(adopted)
            elif survivors is not None:
                self._num_arrived = inheritance.readmit(survivors)

    # What doors call

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted and computed."""
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """Why not, or nothing."""
        paused = PAUSE_REASONS[self._pause] if self._pause is not None else ""
        return self._obstacle or self.dormancy.reason or paused

    @property
    def is_at_rest(self) -> bool:
        """Whether all that speaks against computing is somebody's wish, which somebody can take back."""
        return not self._obstacle and not self.ready

    @property
    def admits(self) -> bool:
        """Whether new requests are let in, be it to wait for the end of a pause."""
        return not self._obstacle and self._pause in (None, PauseMode.KEEP)  # nothing sleeps without a pause

    @property
    def _obstacle(self) -> str:
        """What speaks against new requests besides a pause."""
        return self._closed_reason or ("" if self._group.healthy else self._group.health_reason or "not healthy")

    def on_readiness(self, callback: Callable[[bool], None]) -> None:
        """Call back with ``ready`` now and whenever it may have changed."""
        self._readiness.append(callback)
        callback(self.ready)

    async def generate(self, generation: Generation) -> GenerationStream:
        """Admit a request and return its stream; it waits for its turn from now on.

        Raises:
            NotReady: draining, paused, or the group is stuck or lost.
            DuplicateRequest: the id runs, or finished less than a minute ago.
            QueueFull: too many requests wait.
            InvalidParameter: it can never run here.
            NotBuilt: it asks for what the workers of the group, being of an earlier release, cannot give.
            InternalError: it cannot be written down for the workers, which a door should have noticed.
        """
        self._check_admits(generation.request_id)
        grammar, sampling = None, generation.sampling
        if sampling.constraint is not None:
            if not self.limits.masks:
                raise NotBuilt("the workers of this group take no masks: they are of an earlier release")
            grammar = await self._constrained.compile(sampling.constraint)
            self._check_admits(generation.request_id)  # that took its time
        check_workers_can(generation, self.limits)
        now = self.now()
        request = scheduled_request(generation, masked=grammar is not None, now=now)
        if (refusal := self._scheduler.refusal(request)) is not None:
            raise error_of_refusal(refusal, len(generation.prompt_token_ids))
        stream = GenerationStream(generation, lambda: self._cancel(stream))
        try:
            live = LiveRequest.of(generation, stream, self._tokenizer, now)
            live.grammar = grammar
            # Else a broken stream ends the request, and so does our own end: its client had nothing to look for.
            live.can_be_resumed = self.outlived_by_workers or generation.detach_grace_s > 0
            self._num_arrived += 1
            payload = written_payload(live, self._num_arrived)
        except (ValueError, TypeError, OverflowError) as error:
            raise unwritable(generation, error) from error
        request.payload, request.payload_bytes = payload, payload.num_bytes
        self._enter(live, request)
        return stream

    def _check_admits(self, request_id: RequestId) -> None:
        if not self.admits:
            raise NotReady(f"not accepting requests: {self.not_ready_reason}")
        if request_id in self._live or self._ids.is_recent(request_id, self.now()):
            raise DuplicateRequest(f"request_id={request_id!r}: is running, or finished less than a minute ago")

    def resume(self, request_id: RequestId, token: bytes, identity: str, cursors: Sequence[Cursor]) -> GenerationStream:
        """Return a new stream of a request that is here; it goes on after the cursors, and the one before it ends.

        Raises:
            PermissionDenied: the token is not this request's, or another caller's.
            InvalidParameter, ResumeLost: see ``LiveRequest.attach``.
            NotReady: it was handed over, and is only read to from here.
        """
        live = self._live.get(request_id)
        assert live is not None, "whoever resumes has asked whether it is here"
        if self._has_failed:
            # A spare that is about to have the group may still name us as its owner, also to ourselves.
            raise NotReady(f"not accepting requests: {self.not_ready_reason}")
        stream = resumed_stream(live, token, identity, cursors)
        stream.belong_to(lambda: self._cancel(stream))
        return stream

    def take_over(self, live: LiveRequest, request: scheduled.Request) -> bool:
        """Go on with a request of a lost group, also while draining; False: it cannot run here.

        The client notices a pause and nothing else: its stream, its text so far and its stop rules come along.
        """
        if (
            self._has_failed
            or self._departure.is_under_way
            or not self._group.healthy
            or self._scheduler.refusal(request) is not None
        ):
            return False
        if (stream := live.stream) is not None:
            stream.belong_to(lambda: self._cancel(stream))
        self._enter(live, request)
        return True

    def _enter(self, live: LiveRequest, request: scheduled.Request) -> None:
        self._live.enter(live)
        self._scheduler.add(request)
        self._constrained.enter(live, request)
        self._wake.set()

    def _hold(self, request_id: RequestId, is_held: bool) -> None:
        self._scheduler.set_paused(request_id, is_held)
        self._wake.set()

    def knows(self, request_id: RequestId) -> bool:
        """Whether a request of that id is here."""
        return request_id in self._live

    def client_of(self, request_id: RequestId) -> str | None:
        """Return whose request it is; None: it is not here."""
        live = self._live.get(request_id)
        return None if live is None else live.generation.client_identity

    def held_by(self, identity: str) -> Held:
        """Say how many requests of one caller are here."""
        return self._live.held_by(identity)

    def leave_to(self, other: Engine) -> None:
        """End here what ``other`` computes too: it moved there when nobody could say that this group still had it."""
        for live in self._live:
            if other.knows(live.generation.request_id):
                self._finish(live.generation.request_id, scheduled.FinishReason.ABORT, None, frees_id=False)

    async def proves_ownership(self) -> bool:
        """Ask a rank whether the group is still ours: what is not here is then nowhere in it."""
        return not self._has_failed and await self._group.proves_ownership()

    def candidate(self, token_ids: Sequence[int], cache_namespace: bytes) -> Candidate:
        """Say what speaks for and against sending a request with these tokens here."""
        scheduler = self._scheduler
        return Candidate(
            num_samples=scheduler.num_running + scheduler.num_waiting,
            max_num_seqs=self.limits.max_num_seqs,
            num_cached_tokens=scheduler.cached_prefix_tokens(token_ids, cache_namespace),
        )

    def abort(self, request_id: RequestId) -> bool:
        """End a request; its stream ends with reason abort and its id is free at once. False: it was not running."""
        self._ids.free(request_id)
        return self._finish(request_id, scheduled.FinishReason.ABORT, None)

    def status(self) -> EngineStatus:
        """Say what the engine is doing."""
        now, scheduler, group = self.now(), self._scheduler, self._group
        return EngineStatus(
            model=self._model,
            uptime_s=now - self._started_at,
            ready=self.ready,
            not_ready_reason=self.not_ready_reason,
            epoch=group.facts.epoch if group.facts else 0,
            step=scheduler.step - 1,
            ranks=tuple(group.ranks()),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.num_free_blocks,
            num_cached_blocks=scheduler.num_cached_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_waiting_tokens=scheduler.num_waiting_tokens(),
            prompt_tokens_per_s=self._prompt_rate.per_second(now),
            output_tokens_per_s=self._output_rate.per_second(now),
            steps_per_s=self._step_rate.per_second(now),
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_finished=self._ids.num_finished,
        )

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no row holds; return the number of blocks. The next delta says so."""
        num_blocks = self._scheduler.num_cached_blocks
        self._scheduler.forget_prefix_cache()
        self._wake.set()
        return num_blocks

    async def empty_cache(self) -> None:
        """Take the blocks of all rows, forget what they held, return when the workers know. Inside ``without_steps``.

        Rows that run are computed anew, once there are steps again.
        """
        assert self._num_holds, "steps would fill it again"
        await self._until_nothing_outstanding()
        if self._has_failed:
            return
        self._scheduler.clear_cache()
        self._wake.set()
        while not self._has_failed and self._scheduler.has_unflushed():
            await self._until_settled()
        await self._until_nothing_outstanding()

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Plan no step meanwhile, also where a pause lets requests finish, or becomes one that does."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            self._wake.set()

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncIterator[int]:
        """Send nothing meanwhile, not even what ended; give the last step, which all ranks took (PROTOCOL B10)."""
        self._num_calls += 1
        try:
            await self._until_nothing_outstanding()
            yield self._scheduler.step - 1
        finally:
            self._num_calls -= 1
            self._wake.set()

    async def _until_nothing_outstanding(self) -> None:
        while not self._has_failed and self._scheduler.num_outstanding:
            await self._until_settled()

    async def _until_settled(self) -> None:
        self._has_settled.clear()
        await self._has_settled.wait()

    def pause(self, mode: PauseMode) -> None:
        """Plan no more steps; with WAIT only once no request is here. Steps in flight come to their end.

        Nothing else stops: requests can be cancelled, deadlines pass, and the workers hear of what ended. Whoever
        pauses with ABORT calls ``abort_all`` too.
        """
        self._pause = mode
        self._wake.set()
        self._tell_readiness()

    def unpause(self) -> None:
        """Plan steps again."""
        self._pause = None
        self._wake.set()
        self._has_settled.set()
        self._tell_readiness()

    @property
    def is_still(self) -> bool:
        """Whether a pause has taken effect: no step is under way, and the workers know all that ended."""
        scheduler = self._scheduler
        is_computing = scheduler.num_outstanding or scheduler.has_unflushed()
        may_plan = self._pause is None or (self._pause is PauseMode.WAIT and not self._live.is_idle)
        may_plan = may_plan and not self.dormancy.asleep
        return self._has_failed or not (is_computing or may_plan)

    async def stand_still(self) -> None:
        """Wait until a pause has taken effect, or is over before it has."""
        while self._pause is not None and not self.is_still:
            await self._until_settled()

    def follow_blocks(self, listener: Callable[[Sequence[BlockEvent]], None] | None) -> None:
        """Tell ``listener`` what happens to named blocks from now on, once a step; None: tell nobody."""
        self._block_listener = listener
        self._scheduler.record_block_events(listener is not None)

    def stored_blocks(self) -> tuple[list[BlockStored], int]:
        """Return every named block, parents first, and how many there are whose tokens nobody here knows. O(named).

        What the listener is told after this follows on it.
        """
        self._tell_block_events()
        return self._scheduler.stored_blocks()

    def _tell_block_events(self) -> None:
        if self._block_listener is not None and (events := self._scheduler.take_block_events()):
            self._block_listener(events)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books of the batch do not agree. O(everything)."""
        self._scheduler.check_integrity()

    # What the server calls

    def close(self, reason: str) -> None:
        """Accept no more requests; those admitted go on."""
        self._closed_reason = self._closed_reason or reason
        self._tell_readiness()

    async def drain(self, timeout_s: float | None) -> int:
        """Wait until nothing runs or waits; after ``timeout_s`` abort what is left. Return how many were aborted."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._live.wait_idle()
            return 0
        except TimeoutError:
            return self.abort_all()

    @property
    def is_idle(self) -> bool:
        """Whether no request is here."""
        return self._live.is_idle

    async def wait_idle(self) -> None:
        """Wait until no request is here: all ended, or went elsewhere."""
        await self._live.wait_idle()

    def abort_all(self) -> int:
        """End every request with reason abort; return how many there were."""
        left = [live.generation.request_id for live in self._live]
        for request_id in left:
            self.abort(request_id)
        return len(left)

    async def run(self) -> None:
        """Plan, send, await, publish, until cancelled or the group is lost."""
        try:
            await self._run()
        finally:
            self._constrained.close()

    async def _run(self) -> None:
        while not self._has_failed:
            # Before anything is looked at: who changes something while this pass lets others run wakes the next one.
            self._wake.clear()
            self._apply_results()
            now = self.now()
            for request_id in self._scheduler.expired(now):
                error = DeadlineExceeded("the deadline of the request passed")
                self._finish(request_id, scheduled.FinishReason.DEADLINE, error)
            for request_id in self._live.given_up(now):
                self._finish(request_id, scheduled.FinishReason.ABORT, None, frees_id=False)
            plan = self._plan(now)
            if plan is not None:
                self._send(plan, now)
            if plan is not None or self._outputs:
                await asyncio.sleep(0)  # the writers' turn: the device waits for the delta, no client for its text
            self._publish()
            self._tell_block_events()
            if self._departure.is_under_way and not self._scheduler.num_outstanding:
                self._departure.is_last_step_told.set()
            if not self._scheduler.num_outstanding:
                self._has_settled.set()
            if plan is None and not self._results:
                await self._sleep_until(self._next_alarm())

    # The loop's parts

    def _apply_results(self) -> None:
        while self._results:
            result = self._results.popleft()
            plan = self._plans.pop(Step(result.step))
            try:
                tokens = self._step_results.read(result, plan)
                self._outputs += self._scheduler.apply(tokens)
            except ResultMismatch as error:
                self._group.accuse(OUTPUT_RANK, f"gave an answer that fits no plan: {error}")
                return
            self._constrained.take_tokens(plan, tokens.first_of_each())
            self._constrained.await_step(next(iter(self._plans.values()), None))
            self._group.expect_token_digest(result.step, self._encoder.take_tokens(plan, tokens))
            self._step_rate.add(self.now(), 1)

    def _plan(self, now: float) -> StepPlan | None:
        """Return the next step, if there is anything to send now."""
        if self._num_calls:
            return None
        is_paused = self._pause in (PauseMode.ABORT, PauseMode.KEEP)
        stops = self._departure.is_under_way or is_paused or self._num_holds or self.dormancy.asleep
        plan = None if stops else self._scheduler.schedule(now)
        return plan or self._flush(now)

    def _send(self, plan: StepPlan, now: float) -> None:
        delta = self._encoder.encode(plan)
        runs = plan.mode is PlanMode.RUN
        if runs:
            self._plans[plan.step] = plan
        mode = SchedulerDelta.MODE_RUN if runs else SchedulerDelta.MODE_APPLY_ONLY
        self._group.send(plan.step, delta, mode, state_digest=self._encoder.state_digest, num_tokens=plan.num_tokens)
        self._flush_at = None
        if plan.masked:
            self._constrained.await_step(next(iter(self._plans.values())))
        for request in plan.started:
            live = self._live.get(request.request_id)
            if live is not None and live.started_at is None:  # else it started in a group that was lost
                live.start(request.num_cached_tokens, now)
                self._prompt_rate.add(now, len(request.prompt_token_ids))

    def _flush(self, now: float) -> StepPlan | None:
        """Tell the workers what ended, once it has waited long enough for a step to carry it."""
        if not self._scheduler.has_unflushed():
            return None
        if self._flush_at is None:
            self._flush_at = now + FLUSH_AFTER_S
        return self._scheduler.flush() if now >= self._flush_at else None

    def _publish(self) -> None:
        outputs, self._outputs = self._outputs, []
        now = self.now()
        num_tokens = 0
        for request, index, token_ids, finish, matched_token_id, vector, logprobs, prompt_part in outputs:
            num_tokens += len(token_ids)
            live = self._live.get(request.request_id)
            if live is None:
                continue  # ended meanwhile
            if isinstance(prompt_part, PromptPart):
                live.note_prompt(prompt_part.first_position, prompt_part.columns)
                continue
            if vector is not None and live.stream is not None:
                live.stream.put_vector(vector)
            reason = _REASONS[finish] if finish is not None else None
            told = logprobs if isinstance(logprobs, Logprobs) else None
            stop = live.push(index, token_ids, reason, matched_token_id, now, told)
            if stop is None and finish is None:
                continue
            if finish is None:
                self._scheduler.finish(request.request_id, scheduled.FinishReason.STOP, sample_index=index)
                self._wake.set()  # what there is to send was looked at before
            if live.is_over:
                self._end(live, None)
        if num_tokens:
            self._output_rate.add(now, num_tokens)

    def _next_alarm(self) -> float | None:
        flush_at = self._flush_at if not self._num_calls else None
        alarms = (self._scheduler.next_deadline(), flush_at, self._live.given_up_at)
        return min((at for at in alarms if at is not None), default=None)

    async def _sleep_until(self, alarm: float | None) -> None:
        try:
            async with asyncio.timeout(None if alarm is None else max(alarm - self.now(), 0.001)):
                await self._wake.wait()
        except TimeoutError:
            pass

    # How requests end

    def _cancel(self, stream: GenerationStream) -> None:
        """The consumer of a stream is gone: so is its request, unless another stream has it or may still come."""
        request_id = stream.generation.request_id
        live = self._live.get(request_id)
        if live is None or live.stream is not stream:
            return
        grace_s = stream.generation.detach_grace_s
        if grace_s and live.started_at is not None:  # before that no client knows its resume token
            self._live.detach(live, self.now() + grace_s)
            self._wake.set()
        else:
            self._finish(request_id, scheduled.FinishReason.ABORT, Cancelled("the client went away"))

    def _finish(
        self,
        request_id: RequestId,
        reason: scheduled.FinishReason,
        error: ManipleError | None,
        *,
        frees_id: bool = True,
    ) -> bool:
        """End a request early, with ``error`` or, without one, with finish reason abort."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._scheduler.finish(request_id, reason)
        # Its id may be somebody else's before these are told.
        self._outputs = [output for output in self._outputs if output.request.request_id != request_id]
        self._departure.forget(request_id)
        if error is None:
            live.abort()
            self._end(live, None, frees_id)
        else:
            self._end(live, error, live.started_at is None)
        self._wake.set()
        return True

    def _end(self, live: LiveRequest, error: ManipleError | None, frees_id: bool = False) -> None:
        self._live.end(live, error, self.now(), frees_id=frees_id)
        self._constrained.leave(live.generation.request_id)

    # The owner after us

    async def leave_to_next(self, next_owner: NextOwner) -> bool:
        """Hand the group over with all that runs in it; say whether every rank knew that it is free.

        No step is planned any more; once the outstanding ones are answered and told to the clients, the lease is given
        up, from the last rank to the first. Only then do clients learn where their requests are. Those that cannot
        resume there are read to, from there, until the last of them is done.
        """
        self.close("handing over to another control plane")
        self._departure.is_under_way = True
        self._wake.set()
        if not await self._departure.settle(next_owner.settings.step_timeout_s):
            log.warning("handover.in_midstep", step=self._scheduler.step - 1)
        if self._has_failed:
            return False
        self._has_failed = True
        self._wake.set()
        return await self._departure.complete(next_owner)

    # What the group says

    def _on_result(self, result: StepResult) -> None:
        self._results.append(result)
        self._wake.set()

    def _on_accepted(self, step: int) -> None:
        self._scheduler.acknowledge(Step(step))
        self._wake.set()

    def fail(self, loss: LossReason) -> None:
        """Give every request to another engine, or end it: the group is gone, or this engine cannot go on.

        A request continues elsewhere from what its client has been told, so that is told first. One that a new owner
        of the group continues is left to it.
        """
        if self._has_failed:
            return
        self._has_failed = True
        self._has_settled.set()
        self.close(loss.reason)
        self._results.clear()  # not needed: what they hold is computed anew, and the group may have been wrong
        self._publish()
        is_fenced = loss.kind is LossKind.FENCED
        for request in self._scheduler.requests():
            live = self._live.get(request.request_id)
            if live is None or (is_fenced and request.started):
                continue
            live.num_losses += request.started
            if live.num_losses <= MAX_MOVES and self.hand_over(live, request.continued()):
                self._live.give_away(live)
                self._constrained.leave(request.request_id)
        for live in self._live:
            has_started = live.started_at is not None
            error = error_of_loss(loss, has_started=has_started)
            if loss.kind is LossKind.UNPROVEN and has_started:
                self._ids.add_in_doubt(live, self.now())
            # What a lost group held may be sent again under its id; what a new owner holds may not.
            self._end(live, error, not (is_fenced and has_started))
        self._wake.set()
        self.on_lost(loss)

    def _on_sleep_or_wake(self) -> None:
        self._wake.set()
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        for callback in self._readiness:
            callback(self.ready)
