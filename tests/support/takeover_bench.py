"""Take a ``Bench`` over: its control plane is gone, its worker lives and tells what it knows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

import numpy as np

from control_plane.group.batch_snapshot import BatchSnapshot, RowStanding, read_snapshot
from control_plane.scheduling.adoption import AdoptedRequest, AdoptedRow, SampleEnd, first_end
from control_plane.scheduling.request import FinishReason, Request, SampleState
from control_plane.scheduling.scheduler import Scheduler
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from support.slot_hash_worker import VOCAB, Bench
from worker_service.batch_state import BatchLimits
from worker_service.completed_batch import CompletedBatch
from worker_service.snapshot import snapshot_parts
from worker_service.tombstones import Tombstones


class WatchedBench(Bench):
    """A bench whose worker also keeps what a later owner has to be told."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.tombstones = Tombstones(keep_s=1e9, max_kept=1 << 30)
        self.completed = CompletedBatch(
            BatchLimits(
                max_num_seqs=self.limits.max_num_seqs,
                max_num_batched_tokens=self.limits.max_num_batched_tokens,
                max_model_len=self.limits.max_model_len,
                block_size=self.limits.block_size,
                num_blocks=self.limits.num_blocks,
                vocab_size=VOCAB,
            ),
            self.tombstones,
        )
        self._watch()

    def _watch(self) -> None:
        self.on_plan = lambda plan, delta: self.completed.accept(
            plan.step, SchedulerDelta.FromString(delta).new_requests, 0.0
        )
        execute = type(self.worker).execute

        def executed(work):  # type: ignore[no-untyped-def]
            tokens = execute(self.worker, work)
            num_tokens = np.array(self.worker.num_tokens, np.int32) if self.worker.num_tokens else None
            sampled = np.array(tokens, np.int32)
            self.completed.complete(work, sampled, self.worker.token_digest, 0.0, num_tokens=num_tokens)
            return tokens

        self.worker.execute = executed  # type: ignore[method-assign]

    def snapshot(self) -> BatchSnapshot:
        """What a rank tells of it, through the messages of the protocol."""

        async def parts() -> AsyncIterator[object]:
            for part in snapshot_parts(self.completed.freeze(0.0), None, self.tombstones.all(0.0)):
                yield type(part).FromString(part.SerializeToString())

        return asyncio.run(read_snapshot(parts()))  # type: ignore[arg-type]

    def taken_over(self) -> WatchedBench:
        """Kill the control plane and let another one adopt what runs; requests that were in no delta are lost."""
        while self._in_flight:  # the ranks complete what they accepted; nobody reads the results
            self.worker.execute(self._in_flight.popleft()[1])
        snapshot = self.snapshot()
        new = WatchedBench.__new__(WatchedBench)
        new.__dict__.update(self.__dict__)
        keys = iter(range(snapshot.step << 20, (snapshot.step + 1) << 20))
        new.scheduler = Scheduler(
            self.limits,
            enable_prefix_caching=self.scheduler._tables.caching,
            first_step=snapshot.step + 1,
            key_source=lambda: next(keys),
        )
        new.encoder = type(self.encoder)()
        new.encoder.adopt(snapshot)
        new.outputs, new.reasons, new.plans, new._in_flight = {}, {}, [], deque()
        new._watch()
        new._adopt(snapshot, {request.request_id: request for request, _ in self.outputs})
        new.scheduler.check_integrity()
        return new

    def _adopt(self, snapshot: BatchSnapshot, before: dict[str, Request]) -> None:
        rows: dict[str, list] = {}
        for row in snapshot.rows:
            rows.setdefault(row.request_id, []).append(row)
        buried = {(stone.request_id, stone.sample_index): stone for stone in snapshot.buried}
        batch: list[AdoptedRequest] = []
        for request_id, request in before.items():
            outputs: list[tuple[int, ...] | None] = []
            for index in range(request.n):
                stone = buried.get((request_id, index))
                row = next((row for row in rows.get(request_id, ()) if row.sample_index == index), None)
                known = (row or stone).token_ids[len(request.prompt_token_ids) :] if row or stone else ()
                outputs.append(None if stone is not None and row is None else known)
                end = first_end(request, known, self.scheduler.limit_of(request))
                self.outputs[request, index] = list(known[: end.num_output_tokens] if end else known)
                if end is not None:
                    self.reasons[request, index] = end.reason
                elif stone is not None and row is None:
                    self.reasons[request, index] = None  # type: ignore[assignment]  # aborted
            knows_it = request_id in rows or any((request_id, index) in buried for index in range(request.n))
            if knows_it and any(output is not None for output in outputs):
                batch.append(self._adopted(request, tuple(outputs), rows.get(request_id, [])))
        order = sorted(batch, key=lambda adopted: adopted.request.arrival)
        self.scheduler.adopt(order, snapshot.cached)

    def _adopted(self, request: Request, outputs: tuple[tuple[int, ...] | None, ...], rows: Sequence) -> AdoptedRequest:
        again = Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_ids=request.stop_ids,
            n=request.n,
            priority=request.priority,
            arrival=request.arrival,
            cache_namespace=request.cache_namespace,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            payload=request.payload,
            pools=request.pools,
            outputs=outputs,
        )
        self._rename(request, again)
        limit = self.scheduler.limit_of(again)
        return AdoptedRequest(
            request=again,
            rows=tuple(
                AdoptedRow(
                    sample_index=row.sample_index,
                    state=_STATES[row.standing],
                    req_index=row.req_index,
                    row_key=row.row_key,
                    block_ids=row.block_ids,
                    num_computed_tokens=row.num_computed_tokens,
                    # Nobody comes for a vector: its client waited on a connection that is gone.
                    end=SampleEnd(FinishReason.ABORT, 0)
                    if row.pools
                    else first_end(again, outputs[row.sample_index] or (), limit),
                )
                for row in rows
            ),
        )

    def _rename(self, old: Request, new: Request) -> None:
        for index in range(old.n):
            self.outputs[new, index] = self.outputs.pop((old, index))
            if (old, index) in self.reasons:
                self.reasons[new, index] = self.reasons.pop((old, index))


_STATES = {
    RowStanding.PREFILL: SampleState.PREFILL,
    RowStanding.DECODE: SampleState.DECODE,
    RowStanding.PREEMPTED: SampleState.PREEMPTED,
}
