"""A worker in a few lines, whose tokens depend on what its block tables lead to.

Its cache holds one number per slot: the hash of a token and of the number before it, read through the row's block
table. So a wrong table, a block handed out too early or a prefix hit on the wrong block changes tokens. ``solo`` says
what they must be, without tables, steps or scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from zlib import crc32

import numpy as np

from control_plane.deltas import DeltaEncoder, row_payload, row_pooling, step_tokens
from control_plane.generation import PoolingChoice, SamplingChoice
from control_plane.scheduling.plan import PlanMode, SampleOutput, StepPlan
from control_plane.scheduling.request import FinishReason, Request, Sample, SampleState
from control_plane.scheduling.scheduler import Scheduler, SchedulerLimits
from maniple.v1.scheduler_delta_pb2 import Pooling, RowVector, StepResult
from service_chassis.ids import RequestId
from service_chassis.protocol.digest import MASK64, mix, row_factor, token_term
from worker_service.batch_state import BatchLimits, BatchState, RowState
from worker_service.pooling import Float64Array, Pooler
from worker_service.step_work import Mode, NewRow, StepWork, TableOp

VOCAB = 97
_ROOT = mix(0x736C6F74)


def chain(h: int, token_id: int) -> int:
    """Extend the hash of a context by one token."""
    return mix(h ^ mix(token_id + 1))


def choose(h: int, seed: int, sample_index: int, banned: frozenset[int] = frozenset()) -> int:
    """The token after a context of hash ``h``: the "model" and its sampler."""
    salt = seed << 16 | sample_index << 8
    while (token_id := mix(h ^ mix(salt)) % VOCAB) in banned:
        salt += 1
    return token_id


def solo(request: Request, sample_index: int, limit: int) -> tuple[list[int], FinishReason]:
    """Return the output that a sample must have, whatever else runs; ``limit`` is its longest context."""
    choice = _choice(request)
    if request.pools:
        return [], FinishReason.STOP
    h = _ROOT
    for token_id in request.prompt_token_ids:
        h = chain(h, token_id)
    output: list[int] = []
    while True:
        banned = request.stop_ids if len(output) < request.min_tokens else frozenset()
        output.append(choose(h, choice.seed, sample_index, banned))
        h = chain(h, output[-1])
        if output[-1] in request.stop_ids and len(output) > request.min_tokens:
            return output, FinishReason.STOP
        if len(output) == request.max_tokens or len(request.prompt_token_ids) + len(output) == limit:
            return output, FinishReason.LENGTH


def hidden_of(h: int) -> list[float]:
    """The "hidden state" of a context of hash ``h``: numbers that add up without rounding."""
    return [float(h >> shift & 0xFFF) for shift in (0, 12, 24)]


def solo_vector(request: Request) -> list[float]:
    """Return the vector that a request that pools must have, whatever else runs."""
    h, states = _ROOT, []
    for token_id in request.prompt_token_ids:
        h = chain(h, token_id)
        states.append(hidden_of(h))
    if _pooling(request).kind == Pooling.KIND_LAST:
        return states[-1]
    return [float(np.float32(sum(column) / len(states))) for column in zip(*states, strict=True)]


def _pooling(request: Request) -> Pooling:
    pooling = request.payload.pooling  # type: ignore[attr-defined]
    assert isinstance(pooling, Pooling)
    return pooling


def _choice(request: Request) -> SamplingChoice:
    return SamplingChoice(
        seed=crc32(request.request_id.encode()) & 0xFFFF, min_tokens=request.min_tokens, stop_token_ids=request.stop_ids
    )


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int, **more: object) -> Request:
    """Build a request with the payload that the encoder wants; ``pooling`` is "last" or "mean"."""
    arguments: dict[str, object] = {"arrival": 0.0, **more}
    if (kind := arguments.pop("pooling", None)) is not None:
        arguments |= {"pools": True, "n": 1}
        if kind == "mean":
            arguments["skip_reading_prefix_cache"] = True
    request = Request(
        request_id=RequestId(request_id), prompt_token_ids=tuple(prompt), max_tokens=max_tokens, **arguments
    )  # type: ignore[arg-type]
    request.payload = row_payload(_choice(request))
    if kind is not None:
        pooling = row_pooling(PoolingChoice(is_mean=kind == "mean", normalize=False))
        request.payload = replace(request.payload, pooling=pooling)
    return request


@dataclass
class _Row:
    new: NewRow
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    digest: int = 0


class SlotHashWorker:
    """Executes ``StepWork``s in order; knows nothing else."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots = [0] * (num_blocks * block_size)
        self._rows: dict[int, _Row] = {}
        self._pooler = Pooler()
        self.vectors: list[RowVector] = []  # of the last step
        self.num_tokens: list[int] = []  # of the last step, per row that sampled; empty: one each
        self._guesses = Random(num_blocks)

    @property
    def token_digest(self) -> int:
        return sum(row.digest for row in self._rows.values()) & MASK64

    def known_tokens(self, req_index: int) -> list[int]:
        return self._rows[req_index].tokens

    def execute(self, work: StepWork) -> list[int]:
        size = self._block_size
        self._pooler.apply(work)
        for finished in work.finished:
            del self._rows[finished.req_index]
        for req_index in work.preempted:
            self._rows[req_index].table = []
        blocks = [(dst, self._slots[src * size : (src + 1) * size]) for _, src, dst in work.block_copies]
        for dst, content in blocks:
            self._slots[dst * size : (dst + 1) * size] = content
        for new in work.new_rows:
            tokens = new.token_ids.tolist()
            if new.fork_of is not None:
                tokens = self._rows[new.fork_of].tokens[: new.num_prefill_tokens]
            self._rows[new.req_index] = row = _Row(new, tokens)
            row.digest = sum(token_term(row_factor(new.row_key), place, token) for place, token in enumerate(tokens))
        for change in work.table_changes:
            table = self._rows[change.req_index].table
            if change.op is TableOp.REPLACE:
                table.clear()
            table += change.block_ids
        spans = zip(
            work.rows.tolist(),
            work.num_computed_tokens.tolist(),
            work.num_scheduled_tokens.tolist(),
            work.samples.tolist(),
            strict=True,
        )
        speculation = work.speculation
        tries = speculation.rows if speculation is not None else ()
        sampled = [self._try_ahead(*span[:3]) if span[0] in tries else self._compute(*span) for span in spans]
        self.num_tokens = [len(tokens) for tokens in sampled if tokens] if tries else []
        vectors = self._pooler.take(work, lambda place, *span: self._sum_of(int(work.rows[place]), *span))
        self.vectors = [
            RowVector(req_index=row, values=vector.tolist()) for row, vector in zip(work.pooled, vectors, strict=True)
        ]
        return [token_id for tokens in sampled for token_id in tokens]

    def _sum_of(self, req_index: int, start: int, stop: int) -> Float64Array:
        size, table = self._block_size, self._rows[req_index].table
        places = [table[place // size] * size + place % size for place in range(start, stop)]
        return np.array([hidden_of(self._slots[place]) for place in places], np.float64).sum(axis=0)

    def _compute(self, req_index: int, start: int, count: int, samples: bool) -> list[int]:
        row = self._rows[req_index]
        h = self._write(row, start, row.tokens[start : start + count])
        if not samples:
            return []
        assert start + count == len(row.tokens), "a row samples when all its known tokens are computed"
        return [self._sample(row, h)]

    def _try_ahead(self, req_index: int, start: int, count: int) -> list[int]:
        """Try tokens some of which are right, write them all to the cache, and sample as far as they were right."""
        row, size = self._rows[req_index], self._block_size
        assert start + 1 == len(row.tokens), "a row that tries tokens ahead has computed all that it knows but one"
        tried: list[int] = []
        for _ in range(self._guesses.randrange(count)):
            h = self._write(row, start, [row.tokens[-1], *tried])
            right = choose(h, row.new.sampling.seed, row.new.sample_index, self._banned(row, len(tried)))
            tried.append(right if self._guesses.random() < 0.7 else (right + 1) % VOCAB)
        self._write(row, start, [row.tokens[-1], *tried])
        sampled: list[int] = []
        for place in range(start, start + 1 + len(tried)):
            sampled.append(self._sample(row, self._slots[row.table[place // size] * size + place % size]))
            if sampled != tried[: len(sampled)]:
                break
        return sampled

    def _write(self, row: _Row, start: int, tokens: Sequence[int]) -> int:
        size, slots, table = self._block_size, self._slots, row.table
        h = slots[table[(start - 1) // size] * size + (start - 1) % size] if start else _ROOT
        for place, token_id in enumerate(tokens, start):
            h = mix(h ^ mix(token_id + 1))
            slots[table[place // size] * size + place % size] = h
        return h

    def _banned(self, row: _Row, num_more: int = 0) -> frozenset[int]:
        sampling = row.new.sampling
        num_output_tokens = len(row.tokens) + num_more - row.new.num_prompt_tokens
        return frozenset(sampling.stop_ids) if num_output_tokens < sampling.min_tokens else frozenset()

    def _sample(self, row: _Row, h: int) -> int:
        token_id = choose(h, row.new.sampling.seed, row.new.sample_index, self._banned(row))
        row.digest += token_term(row_factor(row.new.row_key), len(row.tokens), token_id)
        row.tokens.append(token_id)
        return token_id


class Bench:
    """Scheduler, encoder, batch state and worker on one table; steps are in flight until ``complete`` is called.

    Args:
        check: compare the worker's batch state with the scheduler's view after every delta, and all books.
    """

    def __init__(self, *, check: bool = True, enable_prefix_caching: bool = True, **limits: int) -> None:
        self.limits = SchedulerLimits(**{**DEFAULT_LIMITS, **limits})
        keys = iter(range(1, 1 << 30))
        self.scheduler = Scheduler(
            self.limits, enable_prefix_caching=enable_prefix_caching, key_source=lambda: next(keys)
        )
        self.encoder = DeltaEncoder()
        self.state = BatchState(
            BatchLimits(
                max_num_seqs=self.limits.max_num_seqs,
                max_num_batched_tokens=self.limits.max_num_batched_tokens,
                max_model_len=self.limits.max_model_len,
                block_size=self.limits.block_size,
                num_blocks=self.limits.num_blocks,
                vocab_size=VOCAB,
                num_speculative_tokens=self.limits.num_speculative_tokens,
            )
        )
        self.worker = SlotHashWorker(self.limits.num_blocks, self.limits.block_size)
        self.outputs: dict[tuple[Request, int], list[int]] = {}
        self.reasons: dict[tuple[Request, int], FinishReason] = {}
        self.vectors: dict[Request, list[float]] = {}
        self.plans: list[StepPlan] = []
        self.on_plan: Callable[[StepPlan, bytes], None] = lambda plan, delta: None
        self._check = check
        self._in_flight: deque[tuple[StepPlan, StepWork]] = deque()

    @property
    def longest(self) -> int:
        """The longest context that any row can reach."""
        return min(self.limits.max_model_len, (self.limits.num_blocks - 1) * self.limits.block_size + 1)

    def add(self, request: Request) -> Request:
        assert self.scheduler.refusal(request) is None
        self.scheduler.add(request)
        for index in range(request.n):
            self.outputs[request, index] = []
        return request

    def send(self, now: float = 0.0) -> StepPlan | None:
        """Plan one step and put it in flight; None if there is nothing to plan."""
        return self._put_in_flight(self.scheduler.schedule(now))

    def flush(self) -> StepPlan | None:
        return self._put_in_flight(self.scheduler.flush())

    def _put_in_flight(self, plan: StepPlan | None) -> StepPlan | None:
        if plan is None:
            return None
        self.plans.append(plan)
        delta = self.encoder.encode(plan)
        self.on_plan(plan, delta)
        work = self.state.apply(delta)
        assert work.state_digest == self.encoder.state_digest == self.state.digest
        if self._check:
            self.scheduler.check_integrity()
            assert rows_of(self.state) == rows_of_scheduler(self.scheduler)
            assert work.rows[work.samples].tolist() == list(plan.rows)
            assert work.pooled == plan.pooled_rows
        self._in_flight.append((plan, work))
        return plan

    def complete(self) -> list[SampleOutput]:
        """Execute and answer the oldest step in flight."""
        plan, work = self._in_flight.popleft()
        token_ids = self.worker.execute(work)
        if work.mode is Mode.APPLY_ONLY:
            assert plan.mode is PlanMode.APPLY_ONLY
            self.scheduler.acknowledge(plan.step)
            return []
        worker = self.worker
        result = StepResult(step=plan.step, token_ids=token_ids, num_tokens=worker.num_tokens, vectors=worker.vectors)
        tokens = step_tokens(result, plan)
        digest = self.encoder.take_tokens(plan, tokens)
        if self._check:
            assert digest == self.worker.token_digest
        outputs = self.scheduler.apply(tokens)
        for output in outputs:
            key = output.request, output.sample_index
            assert key not in self.reasons, "output after the end"
            self.outputs[key] += output.token_ids
            if output.vector is not None:
                self.vectors[output.request] = list(output.vector)
            if output.finish is not None:
                self.reasons[key] = output.finish
        if self._check:
            self.scheduler.check_integrity()
        return outputs

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def turn(self, now: float = 0.0) -> list[SampleOutput]:
        """Fill the pipeline, then take one answer; as an engine does."""
        while self.send(now) is not None:
            pass
        if not self._in_flight and self.flush() is None:
            return []
        return self.complete()

    def run(self) -> None:
        """Go on until nothing is left to do and everything is said."""
        for _ in range(1_000_000):
            if not (self.scheduler.has_work() or self.scheduler.has_unflushed() or self._in_flight):
                return
            self.turn()
        raise AssertionError("no end")

    def check_outputs(self, requests: Sequence[Request]) -> None:
        """Compare what every sample got with what it must get."""
        for request in requests:
            assert self.vectors.get(request) == (solo_vector(request) if request.pools else None), f"{request}"
            for index in range(request.n):
                expected, reason = solo(request, index, self.longest)
                assert self.outputs[request, index] == expected, f"{request} sample {index}"
                assert self.reasons[request, index] is reason, f"{request} sample {index}"

    def check_empty(self) -> None:
        """Nothing runs, waits, or is held; both ends agree."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_outstanding) == (0, 0, 0)
        assert scheduler.num_free_blocks + scheduler.num_cached_blocks == self.limits.num_blocks - 1
        assert self.state.num_rows == 0
        assert self.state.digest == 0


DEFAULT_LIMITS = {
    "max_num_seqs": 7,
    "max_num_batched_tokens": 29,
    "max_model_len": 120,
    "block_size": 4,
    "num_blocks": 200,
    "max_steps_in_flight": 2,
    "max_num_waiting": 2000,
}

_STATES = {
    SampleState.PREFILL: RowState.PREFILL,
    SampleState.DECODE: RowState.DECODE,
    SampleState.PREEMPTED: RowState.PREEMPTED,
}


def rows_of(state: BatchState) -> dict[int, tuple[object, ...]]:
    """What a worker's batch state holds, in the terms of ``rows_of_scheduler``."""
    return {
        req_index: (
            row.row_key,
            row.request_id,
            row.sample_index,
            row.state,
            row.num_computed_tokens,
            row.num_known_tokens,
            row.tables[0],
        )
        for req_index, row in state.rows().items()
    }


def rows_of_scheduler(scheduler: Scheduler) -> dict[int, tuple[object, ...]]:
    """What the scheduler believes to be in the batch once all its plans are applied."""
    samples: list[Sample] = [s for r in scheduler.requests() for s in r.samples if s.state in _STATES]
    rows = {}
    for sample in samples:
        num_computed = scheduler.num_computed_tokens(sample) + sample.unsettled
        decodes = sample.state is SampleState.DECODE
        rows[int(sample.req_index)] = (
            sample.row_key,
            sample.request.request_id,
            sample.index,
            _STATES[sample.state],
            num_computed,
            num_computed + 1 if decodes else sample.num_prefill_tokens,
            tuple(sample.block_ids),
        )
    return dict(sorted(rows.items()))
