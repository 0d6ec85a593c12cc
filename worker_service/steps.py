"""Take deltas in order, give results back, over one stream after another (PROTOCOL A).

Everything here runs on the event loop. A delta is checked, applied to the batch state and queued for the device in one
go, without an await, so nothing comes between an accepted delta and what is reported of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from maniple.v1 import scheduler_delta_pb2, worker_pb2
from service_chassis.errors import (
    DeltaRefused,
    Fenced,
    InvalidParameter,
    ManipleError,
    OutOfOrder,
    Superseded,
    WrongState,
)
from service_chassis.interceptors import as_maniple_error
from service_chassis.protocol.delta_log import DeltaLog, StepLog
from service_chassis.telemetry import get_logger
from worker_service.batch_state import BatchLimits, BatchState
from worker_service.completed_batch import CompletedBatch
from worker_service.config import WorkerConfig
from worker_service.heartbeat import Failure, Vitals, failure_of
from worker_service.ownership import Ownership
from worker_service.process_group import OUTPUT_RANK
from worker_service.runner import ModelFacts
from worker_service.sample_inputs import SampleInputs
from worker_service.step_loop import CompletedStep, StepLoop
from worker_service.step_work import NOT_SAMPLED, Int32Array, Mode, RowLogprobs, StepWork, places_of_tokens
from worker_service.steps_stream import StepsStream
from worker_service.tombstones import Tombstones

# The owner keeps at most max_steps_in_flight deltas that compute outstanding, but bookkeeping ones are settled by their
# acceptance and pile up behind a long step. More than this is an owner out of its mind.
_MAX_QUEUED_STEPS = 4096
_MIN_RING = 64
_NO_TOKENS = np.zeros(0, np.int32)

Goodbye = worker_pb2.StepsRequest.Goodbye
Results = StepLog[scheduler_delta_pb2.StepResult]


@dataclass(frozen=True, slots=True)
class Batch:
    """What belongs to one formation with its limits: gone as a whole when the batch is dropped."""

    state: BatchState
    completed: CompletedBatch
    deltas: DeltaLog  # as they were accepted, for an adopter
    results: Results
    sample_inputs: SampleInputs


def _new_batch(limits: worker_pb2.GroupLimits, facts: ModelFacts, tombstones: Tombstones, vitals: Vitals) -> Batch:
    """Return an empty batch with rings that outlast what may be outstanding."""
    batch_limits = BatchLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        vocab_size=facts.vocab_size,
        num_kv_groups=facts.num_kv_groups,
        num_speculative_tokens=limits.num_speculative_tokens,
        prompt_lookup_min=limits.prompt_lookup_min,
        prompt_lookup_max=limits.prompt_lookup_max,
    )
    ring = max(2 * limits.max_steps_in_flight, _MIN_RING)
    return Batch(
        BatchState(batch_limits),
        CompletedBatch(batch_limits, tombstones),
        DeltaLog(ring),
        Results(ring),
        SampleInputs(vitals, facts.vocab_size),
    )


class Steps:
    """The stream side of a rank."""

    def __init__(
        self,
        config: WorkerConfig,
        ownership: Ownership,
        vitals: Vitals,
        step_loop: StepLoop,
        tombstones: Tombstones,
        on_failure: Callable[[Failure], None],
        on_goodbye: Callable[[Goodbye.Kind.ValueType], None],
    ) -> None:
        self.batch: Batch | None = None  # set from AllocateKvCache to the drop of the batch
        self.ready = False  # deltas are accepted
        self.asleep: frozenset[str] = frozenset()  # while anything is, they may only say what ended
        self._config = config
        self._ownership = ownership
        self._vitals = vitals
        self._step_loop = step_loop
        self._tombstones = tombstones
        self._on_failure = on_failure
        self._on_goodbye = on_goodbye
        self._stream: StepsStream | None = None
        self._tells_timings = False  # on the present stream

    def begin(self, limits: worker_pb2.GroupLimits, facts: ModelFacts) -> None:
        """Start counting steps of a formation, with an empty batch."""
        self.batch = batch = _new_batch(limits, facts, self._tombstones, self._vitals)
        self._vitals.accepted = (batch.state.accepted, batch.state.digest)
        self._vitals.completed = (batch.state.accepted, 0)

    def drop(self) -> None:
        """Forget the batch. Completions of steps that are still queued are ignored from now on."""
        if self.batch is not None:
            self.batch.sample_inputs.release()
        self.batch = None
        self.ready = False
        self._vitals.accepted = self._vitals.completed = (0, 0)

    def end_stream(self, error: ManipleError | None) -> None:
        """End the present stream, if there is one."""
        if self._stream is not None:
            self._stream.end(error)
            self._stream = None

    def report_now(self) -> None:
        """Report on the present stream at once."""
        if self._stream is not None:
            self._stream.report_now()

    def _results_after(self, step: int) -> list[tuple[int, scheduler_delta_pb2.StepResult]]:
        return self.batch.results.after(step) if self.batch is not None else []

    async def serve(self, requests: AsyncIterator[worker_pb2.StepsRequest]) -> AsyncIterator[worker_pb2.StepsResponse]:
        """Serve one stream from its Hello on."""
        epoch, hello = await self._hello(requests)
        refused = self._ownership.greets(epoch, hello.owner_id)
        if refused is not None:
            get_logger().warning("hello.refused", epoch=epoch, reason=refused.reason)
            raise Fenced(refused.reason)
        self.end_stream(Superseded(f"a newer Steps stream of epoch {epoch} replaced this one"))
        stream = self._stream = StepsStream(
            self._vitals,
            self._results_after,
            last_result_step=hello.last_result_step,
            report_interval_s=self._config.report_interval_s,
            idle_report_interval_s=self._config.idle_report_interval_s,
        )
        self._ownership.heard(time.monotonic())
        accepted, digest = self._vitals.accepted
        get_logger().info("stream.opened", epoch=epoch, accepted=accepted, last_result_step=hello.last_result_step)
        self._tells_timings = hello.wants_timings
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            yield worker_pb2.StepsResponse(
                welcome=worker_pb2.StepsResponse.Welcome(
                    incarnation_id=self._vitals.incarnation_id,
                    accepted=accepted,
                    completed=self._vitals.completed[0],
                    state_digest=digest,
                    clock_ns=time.monotonic_ns(),
                )
            )
            async for message in stream.messages():
                yield message
        finally:
            stream.ended = True
            if self._stream is stream:
                self._stream = None
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _hello(
        self, requests: AsyncIterator[worker_pb2.StepsRequest]
    ) -> tuple[int, worker_pb2.StepsRequest.Hello]:
        rule = "the first message of a stream must be hello"
        try:
            async with asyncio.timeout(self._config.hello_timeout_s):
                first = await anext(requests)
        except (StopAsyncIteration, TimeoutError):
            raise InvalidParameter("message", None, rule) from None
        if first.WhichOneof("message") != "hello":
            raise InvalidParameter("message", first.WhichOneof("message"), rule)
        return first.epoch, first.hello

    async def _read(self, stream: StepsStream, requests: AsyncIterator[worker_pb2.StepsRequest]) -> None:
        """Take messages until the stream ends, on either side. Never waits for the device."""
        try:
            async for request in requests:
                if stream.ended:
                    return
                self._take(stream, request)
                if stream.ended:
                    return
            stream.end()  # without a goodbye: a transport loss, the lease runs on
        except Exception as error:
            stream.end(as_maniple_error(error, method="Steps"))

    def _take(self, stream: StepsStream, request: worker_pb2.StepsRequest) -> None:
        which = request.WhichOneof("message")
        if which == "hello":
            raise InvalidParameter("message", which, "hello comes first and only first")
        if which == "delta":
            self._take_delta(stream, request.epoch, request.delta)
            return
        if self._ownership.refusal(request.epoch) is not None:
            return  # unnumbered and stale: dropped
        self._ownership.heard(time.monotonic())
        if which == "goodbye":
            kind = request.goodbye.kind
            if kind not in Goodbye.Kind.values():
                raise InvalidParameter("goodbye.kind", kind, f"must be one of {', '.join(Goodbye.Kind.keys())}")
            get_logger().info("owner.left", epoch=request.epoch, goodbye=Goodbye.Kind.Name(kind))
            self._on_goodbye(kind)
            stream.end()
        elif which == "sample_input":
            self._take_sample_input(request.sample_input)

    def _take_sample_input(self, sample_input: scheduler_delta_pb2.SampleInput) -> None:
        if self._config.rank != OUTPUT_RANK or self.batch is None:
            return  # only where it is sampled, something waits
        try:
            self.batch.sample_inputs.take(sample_input, accepted=self._vitals.accepted[0])
        except DeltaRefused as error:
            self._on_failure(Failure(type(error).__name__, error.message, sample_input.step))
            raise

    def take_broadcast(self, message: bytes) -> None:
        """Take an envelope with a delta that came beside the stream, where nothing is lost and nothing comes twice.

        So there is no stream to end and to open again: what is wrong with it is the failure of this rank.
        """
        try:
            request = worker_pb2.StepsRequest.FromString(message)
            self._take_delta(self._stream, request.epoch, request.delta)
        except ManipleError as error:
            if self._vitals.failure is None:
                self._on_failure(Failure(type(error).__name__, error.message, self._vitals.accepted[0] + 1))

    def _take_delta(self, stream: StepsStream | None, epoch: int, raw: bytes) -> None:
        expected = {"expected_step": str(self._vitals.accepted[0] + 1)}
        refused = self._ownership.refusal(epoch)
        if refused is not None:
            raise Fenced(refused.reason, metadata=expected)
        self._ownership.heard(time.monotonic())
        if self._vitals.failure is not None:
            raise WrongState(f"the rank failed: {self._vitals.failure.message}")
        if self.batch is None or not self.ready:
            raise WrongState("deltas are accepted once all six stages are done")
        was_active = self._vitals.active
        try:
            self._accept(self.batch, raw)
        except OutOfOrder as error:
            get_logger().warning("delta.refused", epoch=epoch, reason=error.message)
            raise
        except DeltaRefused as error:
            # Found before anything changed, but resending cannot help: the rank and its owner differ for good.
            self._on_failure(Failure(type(error).__name__, error.message, int(expected["expected_step"])))
            raise
        if not was_active and stream is not None:
            stream.became_active()

    def _accept(self, batch: Batch, raw: bytes) -> None:
        """Check a delta, apply it to the batch state, queue it. Raises ``OutOfOrder`` or ``DeltaRefused``."""
        try:
            delta = scheduler_delta_pb2.SchedulerDelta.FromString(raw)
        except DecodeError:
            raise DeltaRefused(f"a delta of {len(raw)} bytes is not a well-formed SchedulerDelta") from None
        due = batch.state.accepted + 1
        if delta.step != due:
            what = "a gap" if delta.step > due else "a repetition"
            raise OutOfOrder(
                f"step {delta.step} is {what}: the expected step is {due}", metadata={"expected_step": str(due)}
            )
        if due - self._vitals.completed[0] > _MAX_QUEUED_STEPS:
            raise DeltaRefused(f"step {delta.step}: more than {_MAX_QUEUED_STEPS} deltas wait for the device")
        if self.asleep and (delta.mode != scheduler_delta_pb2.SchedulerDelta.MODE_APPLY_ONLY or delta.block_copies):
            tags = ", ".join(sorted(self.asleep))
            raise DeltaRefused(f"step {delta.step}: mode must be APPLY_ONLY, without block_copies, while {tags} sleep")
        work = batch.state.apply(delta)
        batch.completed.accept(delta.step, delta.new_requests, time.monotonic())
        batch.deltas.append(delta.step, raw)
        if work.awaits_mask and self._config.rank == OUTPUT_RANK:
            work = replace(work, gate=batch.sample_inputs.gate(work.step, work.awaits_mask))
        self._vitals.accepted = (batch.state.accepted, batch.state.digest)
        self._step_loop.submit(work)
        if work.mode is Mode.APPLY_ONLY:
            self.report_now()  # it has no result: its acceptance is what others wait for

    def on_completed(self, done: CompletedStep) -> None:
        """Take what the device thread made of one step."""
        batch, step = self.batch, done.work.step
        if batch is None or step != self._vitals.completed[0] + 1:
            return  # of a batch that was dropped
        sampled = done.output.token_ids if done.output is not None else _NO_TOKENS
        num_tokens = done.output.num_tokens if done.output is not None else None
        logprobs = done.output.logprobs if done.output is not None else ()
        try:
            batch.completed.complete(done.work, sampled, done.token_digest, time.monotonic(), logprobs, num_tokens)
        except Exception as error:  # the device returned something else than was asked for: nobody would hear of it
            get_logger().error("step.not_completed", step=step, exc_info=error)
            self._on_failure(failure_of(error, step=step))
            return
        batch.sample_inputs.completed(step)
        self._note_void(batch, done.work, sampled, num_tokens)
        self._vitals.completed = (step, done.token_digest)
        if self._tells_timings and self._stream is not None:
            self._stream.tell_timing(_timing(done))
        if self._stream is not None and step == self._vitals.accepted[0]:
            self._stream.caught_up()
        if done.work.mode is not Mode.RUN or done.output is None:
            return
        if self._config.rank != OUTPUT_RANK:
            return  # that one answers
        given = sampled != NOT_SAMPLED
        batch.results.append(
            step,
            scheduler_delta_pb2.StepResult(
                step=step,
                token_ids=sampled[given].tolist(),
                num_tokens=_num_given(given, num_tokens),
                vectors=_vectors(done),
                logprobs=[_row_logprobs(one) for one in logprobs],
                device_us=done.output.device_us or done.device_us,
                queued_us=done.queued_us,
            ),
        )
        if self._stream is not None:
            self._stream.result_ready()

    @staticmethod
    def _note_void(batch: Batch, work: StepWork, sampled: Int32Array, num_tokens: Int32Array | None) -> None:
        if work.mode is not Mode.RUN or not (void := sampled == NOT_SAMPLED).any():
            return
        rows, _ = places_of_tokens(work, num_tokens)
        for row in rows[void].tolist():
            batch.state.note_void(row, batch.completed.row_key(row), len(batch.completed.known_tokens(row)))


def _num_given(given: npt.NDArray[np.bool_], num_tokens: Int32Array | None) -> list[int]:
    """Return how many tokens each row got, nothing where all got one; ``given`` says it of each token."""
    if num_tokens is None:
        return [] if given.all() else given.astype(int).tolist()
    counts: list[int] = np.add.reduceat(given.astype(int), np.cumsum(num_tokens) - num_tokens).tolist()
    return counts


def _timing(done: CompletedStep) -> worker_pb2.StepsResponse.StepTiming:
    return worker_pb2.StepsResponse.StepTiming(
        step=done.work.step,
        accepted_ns=done.accepted_ns,
        started_ns=done.started_ns,
        sampling_ns=done.output.sampling_ns if done.output is not None else 0,
        completed_ns=done.completed_ns,
    )


def _row_logprobs(told: RowLogprobs) -> scheduler_delta_pb2.RowLogprobs:
    return scheduler_delta_pb2.RowLogprobs(
        req_index=told.req_index,
        sampled=told.sampled.to_message() if told.sampled is not None else None,
        prompt=told.prompt.to_message() if told.prompt is not None else None,
        first_position=told.first_position,
    )


def _vectors(done: CompletedStep) -> list[scheduler_delta_pb2.RowVector]:
    """Return the vectors that a step completed, with their rows."""
    if done.output is None or not done.work.pooled:
        return []
    pairs = zip(done.work.pooled, done.output.vectors, strict=True)
    return [scheduler_delta_pb2.RowVector(req_index=row, values=vector.tolist()) for row, vector in pairs]
