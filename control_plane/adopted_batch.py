"""Turn the snapshot of a batch back into requests: what a dead owner's engine held, rebuilt from what workers kept.

A snapshot may hold more than clients were ever to get: the dead owner had steps in flight when a sample met its end,
and may have died before any delta said so. So text, stop strings and token rules are replayed from the first output
token (PROTOCOL C5), and what they give is the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.control_blob import ControlFacts, ResumeRight, UnreadableBlob, read_blob, sampling_of
from control_plane.deltas import RowPayload
from control_plane.generation import FinishReason, Generation, PoolingChoice, SamplingChoice
from control_plane.group.batch_snapshot import BatchSnapshot, BuriedRow, LeaveReason, LiveRow, RowStanding
from control_plane.live_request import LiveRequest
from control_plane.scheduling import request as scheduled
from control_plane.scheduling.adoption import AdoptedRequest, AdoptedRow, SampleEnd, first_end
from control_plane.text.tokenizer import Tokenizer
from maniple.v1.sampling_pb2 import RowSampling
from service_chassis.errors import DeadlineExceeded
from service_chassis.ids import RequestId
from service_chassis.protocol.logprobs import Logprobs
from service_chassis.telemetry import get_logger

log = get_logger()

_STATES = {
    RowStanding.PREFILL: scheduled.SampleState.PREFILL,
    RowStanding.DECODE: scheduled.SampleState.DECODE,
    RowStanding.PREEMPTED: scheduled.SampleState.PREEMPTED,
}
_REASONS = {
    scheduled.FinishReason.STOP: FinishReason.STOP,
    scheduled.FinishReason.LENGTH: FinishReason.LENGTH,
    scheduled.FinishReason.ABORT: FinishReason.ABORT,
}

LimitOf = Callable[[scheduled.Request], int]


@dataclass(slots=True)
class _Known:
    """All that a snapshot says of one request."""

    request_id: RequestId
    control_blob: bytes
    rows: dict[int, LiveRow] = field(default_factory=dict)  # by sample
    buried: dict[int, BuriedRow] = field(default_factory=dict)  # by sample

    @property
    def prompt(self) -> tuple[int, ...]:
        known: list[LiveRow | BuriedRow] = [*self.rows.values(), *self.buried.values()]
        return known[0].token_ids[: known[0].num_prompt_tokens]

    def logprobs(self, index: int) -> Logprobs | None:
        """What is kept of those of a sample's output."""
        one: LiveRow | BuriedRow | None = self.rows.get(index) or self.buried.get(index)
        return None if one is None else one.logprobs.output

    def prompt_logprobs(self) -> Logprobs | None:
        """What is known of the prompt's, from the second token on: several may have told of it, some not to the end."""
        known: list[LiveRow | BuriedRow] = [*self.rows.values(), *self.buried.values()]
        told = [one.logprobs.prompt for one in known if one.logprobs.prompt is not None]
        return max(told, key=len, default=None)

    def output(self, index: int) -> tuple[int, ...] | None:
        """All known output of a sample; None where nothing is known of it."""
        one: LiveRow | BuriedRow | None = self.rows.get(index) or self.buried.get(index)
        return None if one is None else one.token_ids[one.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Continued:
    """A request that goes on. Nobody reads it yet."""

    live: LiveRequest
    adopted: AdoptedRequest
    arrival_number: int

    def readmitted(self) -> scheduled.Request:
        """Return the request for a group that knows nothing of it; ``live`` is not over."""
        before = self.adopted.request
        return scheduled.Request(
            request_id=before.request_id,
            prompt_token_ids=before.prompt_token_ids,
            max_tokens=before.max_tokens,
            min_tokens=before.min_tokens,
            stop_ids=before.stop_ids,
            n=before.n,
            priority=before.priority,
            arrival=before.arrival,
            deadline=before.deadline,
            cache_namespace=before.cache_namespace,
            skip_reading_prefix_cache=before.skip_reading_prefix_cache,
            payload=before.payload,
            payload_bytes=before.payload_bytes,
            result_entries=before.result_entries,
            masked=before.masked,
            outputs=tuple(
                None if sample.reason is not None else tuple(sample.token_ids) for sample in self.live.samples
            ),
        )


@dataclass(frozen=True, slots=True)
class Remembered:
    """A request of which all rows left: told on demand, since most are never asked for."""

    request_id: RequestId
    age_s: float  # since the last row left
    is_free: bool  # its id may be used again
    tell: Callable[[], LiveRequest]


@dataclass(frozen=True, slots=True)
class BatchOfRequests:
    """A snapshot in the terms of an engine."""

    continued: tuple[Continued, ...]  # in order of arrival
    remembered: tuple[Remembered, ...]  # the one that left first comes first
    last_arrival_number: int


def requests_of(snapshot: BatchSnapshot, *, limit_of: LimitOf, tokenizer: Tokenizer, now: float) -> BatchOfRequests:
    """Rebuild the requests of a snapshot.

    Args:
        snapshot: of a group.
        limit_of: known tokens with which a sample of a request ends at the latest.
        tokenizer: of the model.
        now: on the engine's clock.
    """
    continued, remembered, last_number = [], [], 0
    for known in _grouped(snapshot):
        if any(row.pools for row in known.rows.values()):
            # Its client waited for one answer on a connection that died with the owner, and has no way to resume.
            continued.append(_given_up(known, tokenizer, now))
            continue
        try:
            facts = read_blob(known.control_blob)
        except UnreadableBlob as error:
            if known.rows:  # somebody's rows all the same: they must leave the batch
                log.warning("request.unreadable", request_id=known.request_id, reason=str(error))
                continued.append(_given_up(known, tokenizer, now))
            continue
        last_number = max(last_number, facts.arrival_number)
        if known.rows or not _all_left(known, facts):
            continued.append(_continued(known, facts, limit_of, tokenizer, now))
        else:
            remembered.append(_remembered(known, facts, limit_of, tokenizer, now))
    return BatchOfRequests(
        continued=tuple(sorted(continued, key=lambda one: one.arrival_number)),
        remembered=tuple(sorted(remembered, key=lambda one: -one.age_s)),
        last_arrival_number=last_number,
    )


def _grouped(snapshot: BatchSnapshot) -> list[_Known]:
    """Collect what belongs together. Blobs tell apart two requests of one id, one of which was aborted."""
    known: dict[tuple[RequestId, bytes], _Known] = {}
    for row in snapshot.rows:
        key = row.request_id, row.control_blob
        known.setdefault(key, _Known(*key)).rows[row.sample_index] = row
    for stone in snapshot.buried:
        key = stone.request_id, stone.control_blob
        known.setdefault(key, _Known(*key)).buried[stone.sample_index] = stone
    return list(known.values())


def _all_left(known: _Known, facts: ControlFacts) -> bool:
    """Say whether the request is over. One that was ended as a whole may have samples that never began."""
    ended_early = any(stone.reason in (LeaveReason.ABORT, LeaveReason.DEADLINE) for stone in known.buried.values())
    return ended_early or len(known.buried) == facts.n


def _continued(known: _Known, facts: ControlFacts, limit_of: LimitOf, tokenizer: Tokenizer, now: float) -> Continued:
    row = next(iter(known.rows.values()), None)
    age_s = max((row.age_s for row in known.rows.values()), default=0.0)
    deadline = now + row.deadline_s if row is not None and row.deadline_s is not None else None
    sampling = row.sampling if row is not None else facts.sampling
    assert sampling is not None, "a blob of several samples says how they are sampled"
    generation = _generation(
        known, facts, sampling_of(sampling, facts), row.cache_namespace if row else facts.cache_namespace, deadline
    )
    # What left and is not even a tombstone is computed again: the tokens are the same, and its client waits for them.
    outputs = tuple(
        None if index in known.buried and index not in known.rows else known.output(index) or ()
        for index in range(facts.n)
    )
    request = _scheduled(generation, facts, sampling, outputs, known.control_blob, now)
    live = _started(generation, facts.right, tokenizer, known, now, age_s)
    limit = limit_of(request)
    for index in known.buried.keys() - known.rows.keys():
        _replay_buried(live, known.buried[index], request, limit, now)
    rows = tuple(
        _adopted_row(row, _replay(live, index, known.output(index) or (), row.logprobs.output, request, limit, now))
        for index, row in sorted(known.rows.items())
    )
    return Continued(live, AdoptedRequest(request=request, rows=rows), facts.arrival_number)


def _remembered(known: _Known, facts: ControlFacts, limit_of: LimitOf, tokenizer: Tokenizer, now: float) -> Remembered:
    age_s = min(stone.age_s for stone in known.buried.values())
    was_aborted = any(stone.reason is LeaveReason.ABORT for stone in known.buried.values())

    def tell() -> LiveRequest:
        some = [logprobs for index in known.buried if (logprobs := known.logprobs(index)) is not None]
        prompt = known.prompt_logprobs()
        sampling = SamplingChoice(
            num_logprobs=some[0].width - 1 if some else None,
            num_prompt_logprobs=prompt.width - 1 if prompt is not None else None,
            n=facts.n,
            max_tokens=facts.max_tokens,
            min_tokens=facts.min_tokens,
            eos_ids=facts.eos_ids,
            stop_token_ids=facts.stop_token_ids,
        )
        generation = _generation(known, facts, sampling, b"", None)
        request = _scheduled(generation, facts, RowSampling(), (), known.control_blob, now)
        live = _started(generation, facts.right, tokenizer, known, now, age_s)
        for index in range(facts.n):
            if index in known.buried:
                _replay_buried(live, known.buried[index], request, limit_of(request), now)
        if any(stone.reason is LeaveReason.DEADLINE for stone in known.buried.values()):
            live.fail(DeadlineExceeded("the deadline of the request passed"))
        else:
            live.abort()
            live.close(now)
        return live

    return Remembered(known.request_id, age_s, was_aborted, tell)


def _given_up(known: _Known, tokenizer: Tokenizer, now: float) -> Continued:
    """Rebuild just enough of a request that nobody can take up to end it."""
    n = max(row.n for row in known.rows.values())
    first = next(iter(known.rows.values()))
    sampling = SamplingChoice(n=n, max_tokens=max(len(row.token_ids) for row in known.rows.values()))
    generation = Generation(
        request_id=known.request_id,
        prompt_token_ids=known.prompt,
        sampling=sampling,
        pooling=PoolingChoice() if first.pools else None,
    )
    payload = RowPayload(sampling=first.sampling, control_blob=known.control_blob)
    request = scheduled.Request(
        request_id=known.request_id,
        prompt_token_ids=known.prompt,
        max_tokens=sampling.max_tokens,
        n=n,
        arrival=now,
        payload=payload,
        payload_bytes=payload.num_bytes,
        pools=first.pools,
        outputs=tuple(known.output(index) if index in known.rows else None for index in range(n)),
    )
    live = LiveRequest.of(generation, None, tokenizer, now)
    live.abort()
    rows = tuple(
        _adopted_row(row, SampleEnd(scheduled.FinishReason.ABORT, len(row.token_ids) - row.num_prompt_tokens))
        for row in known.rows.values()
    )
    return Continued(live, AdoptedRequest(request=request, rows=rows), 0)


def _generation(
    known: _Known, facts: ControlFacts, sampling: SamplingChoice, cache_namespace: bytes, deadline: float | None
) -> Generation:
    return Generation(
        request_id=known.request_id,
        prompt_token_ids=known.prompt,
        sampling=sampling,
        text=facts.text,
        priority=facts.priority,
        cache_namespace=cache_namespace,
        skip_reading_prefix_cache=facts.skip_reading_prefix_cache,
        deadline=deadline,
        detach_grace_s=facts.detach_grace_s,
        only_final=facts.only_final,
        client_resumes=True,  # whoever comes for it
        client_identity=facts.right.client_identity,
        traceparent=facts.traceparent,
    )


def _scheduled(
    generation: Generation,
    facts: ControlFacts,
    sampling: RowSampling,
    outputs: tuple[tuple[int, ...] | None, ...],
    control_blob: bytes,
    now: float,
) -> scheduled.Request:
    payload = RowPayload(sampling=sampling, control_blob=control_blob)
    return scheduled.Request(
        request_id=generation.request_id,
        prompt_token_ids=generation.prompt_token_ids,
        max_tokens=facts.max_tokens,
        min_tokens=facts.min_tokens if facts.constraint is None else 0,  # masks saw to it
        stop_ids=facts.eos_ids | facts.stop_token_ids,
        n=facts.n,
        priority=facts.priority,
        arrival=now,  # all came before who comes now; among each other they are ordered by their numbers
        deadline=generation.deadline,
        cache_namespace=generation.cache_namespace,
        skip_reading_prefix_cache=facts.skip_reading_prefix_cache,
        payload=payload,
        payload_bytes=payload.num_bytes,
        masked=facts.constraint is not None,
        result_entries=generation.prompt_entries,
        outputs=outputs,
    )


def _started(
    generation: Generation, right: ResumeRight, tokenizer: Tokenizer, known: _Known, now: float, age_s: float
) -> LiveRequest:
    live = LiveRequest.of(generation, None, tokenizer, now - age_s, right)
    live.has_earlier_tokens = any(known.output(index) for index in known.rows.keys() | known.buried.keys())
    if (prompt := known.prompt_logprobs()) is not None:
        live.note_prompt(1, prompt)
    first = known.rows.get(0)
    live.start(first.num_cached_tokens if first is not None else 0, now - age_s)
    return live


def _replay(
    live: LiveRequest,
    index: int,
    output: tuple[int, ...],
    logprobs: Logprobs | None,
    request: scheduled.Request,
    limit: int,
    now: float,
) -> SampleEnd | None:
    """Apply all rules to an output from its first token on; say where it ended, if it did."""
    end = first_end(request, output, limit)
    finish = _REASONS[end.reason] if end is not None else None
    counted = output[: end.num_output_tokens] if end is not None else output
    matched = end.matched_token_id if end is not None else None
    told = logprobs.part(0, len(counted)) if logprobs is not None else None
    stop = live.push(index, counted, finish, matched, now, told)
    if stop is not None:
        return SampleEnd(scheduled.FinishReason.STOP, live.samples[index].num_output_tokens)
    return end


def _replay_buried(live: LiveRequest, stone: BuriedRow, request: scheduled.Request, limit: int, now: float) -> None:
    index, output = stone.sample_index, stone.token_ids[stone.num_prompt_tokens :]
    if _replay(live, index, output, stone.logprobs.output, request, limit, now) is None:
        live.abort_sample(index)  # no rule of its own ended it


def _adopted_row(row: LiveRow, end: SampleEnd | None) -> AdoptedRow:
    return AdoptedRow(
        sample_index=row.sample_index,
        state=_STATES[row.standing],
        req_index=row.req_index,
        row_key=row.row_key,
        block_ids=row.block_ids,
        num_computed_tokens=row.num_computed_tokens,
        end=end,
        is_void=row.is_void,
    )
