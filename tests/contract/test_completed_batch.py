"""The contract between a rank's device and its memory: the event loop's copy of the batch is the device's, always.

Hypothesis chooses limits and traffic. After every completed step the copy is compared with the rows of the worker that
executed it; whenever nothing is in flight, with the batch state as well. Chain hashes of free blocks are held against
what the cache's slots contain, and against the prefix cache of the scheduler.
"""

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.scheduling.plan import PlanMode
from control_plane.scheduling.request import FinishReason
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from service_chassis.protocol.block_hash import block_hash, root_hash
from support.delta_traffic import LIMITS, OPERATIONS, play
from support.slot_hash_worker import _ROOT, Bench, SlotHashWorker, chain, make_request
from worker_service.completed_batch import CompletedBatch
from worker_service.tombstones import Tombstones

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Witness(SlotHashWorker):
    """A worker whose steps are also told to a ``CompletedBatch``, which is compared at once."""

    def __init__(self, bench):
        limits = bench.state.limits
        super().__init__(limits.num_blocks, limits.block_size)
        self.tombstones = Tombstones(max_kept=10_000)
        self.memory = CompletedBatch(limits, self.tombstones)
        self.left = []  # request id, sample, tokens that count
        self.contents = {}  # hash -> the tokens that it stands for, from all rows that ever were
        self.num_resumed = self.num_forks = self.num_cache_checks = 0
        self.forgotten = set()
        self._bench = bench
        bench.worker = self
        bench.on_plan = self._accept

    def _accept(self, plan, raw):
        delta = SchedulerDelta.FromString(raw)
        self.memory.accept(delta.step, delta.new_requests, float(delta.step))

    def execute(self, work):
        for finished in work.finished:
            row = self._rows[finished.req_index]
            self.left.append((row.new.request_id, row.new.sample_index, row.tokens[: finished.num_tokens]))
        if work.forget_prefix_cache:
            # One delta does not say which came first, so what is let go with it is forgotten with it.
            gone = [finished.req_index for finished in work.finished] + list(work.preempted)
            self.forgotten = {block for row in gone for block in self._rows[row].table}
        self.num_resumed += len(work.resumed)
        self.num_forks += sum(new.fork_of is not None for new in work.new_rows)
        token_ids = super().execute(work)
        num_tokens = np.array(self.num_tokens, np.int32) if self.num_tokens else None
        sampled = np.array(token_ids, np.int32)
        self.memory.complete(work, sampled, self.token_digest, float(work.step), num_tokens=num_tokens)
        self.check(work)
        return token_ids

    def check(self, work):
        frozen = self.memory.freeze(float(work.step))
        assert (frozen.step, frozen.state_digest) == (work.step, work.state_digest)
        rows = {row.req_index: row for row in frozen.rows}
        assert list(rows) == sorted(self._rows)
        for req_index, row in self._rows.items():
            assert rows[req_index].token_ids.tolist() == row.tokens
            assert rows[req_index].tables == (tuple(row.table),)
            assert rows[req_index].request.row_key == row.new.row_key
            assert not rows[req_index].request.HasField("fork_of")
            self._learn(row)
        self._check_hashes(frozen)
        if work.forget_prefix_cache:
            assert frozen.block_hashes == ((),)
        if self._bench.num_in_flight == 0:
            self._check_state(rows)
            self._check_cache(dict(frozen.block_hashes[0]))
        buried = [(t.request_id, t.sample_index, list(t.token_ids)) for t, _ in self.tombstones.all(0.0)]
        assert buried == self.left

    def _learn(self, row):
        size, parent = self._block_size, root_hash(row.new.cache_namespace)
        for end in range(size, len(row.tokens) + 1, size):
            parent = block_hash(parent, row.tokens[end - size : end])
            self.contents[parent] = tuple(row.tokens[:end])

    def _check_hashes(self, frozen):
        """What a hash names is what lies in the block's slots."""
        held = {block for row in frozen.rows for block in row.tables[0]}
        size = self._block_size
        for block, name in frozen.block_hashes[0]:
            assert block not in held
            chained = [_ROOT]
            for token_id in self.contents[name]:
                chained.append(chain(chained[-1], token_id))
            assert self._slots[block * size : (block + 1) * size] == chained[-size:]

    def _check_state(self, rows):
        for req_index, facts in self._bench.state.rows().items():
            row = rows[req_index]
            assert (row.state, row.num_computed_tokens, row.num_prefill_tokens) == (
                facts.state,
                facts.num_computed_tokens,
                facts.num_prefill_tokens,
            )
            num_unsettled = self._bench.state._rows[req_index].num_unsettled
            num_known = len(row.token_ids)
            assert row.tables == facts.tables
            # What was tried ahead in vain is known here alone, until a delta says so.
            assert facts.num_known_tokens - num_unsettled <= num_known <= facts.num_known_tokens

    def _check_cache(self, kept):
        """Every block that the scheduler could still hit is known here, by the same hash."""
        pool = self._bench.scheduler._pool
        held = {block for facts in self._bench.state.rows().values() for block in facts.tables[0]}
        for block in pool._cached:
            if block not in held:  # else its last holder leaves with a delta that is still to come
                assert kept.get(block) == pool._named[block].name or block in self.forgotten
                self.num_cache_checks += 1


@SETTINGS
@given(limits=LIMITS, operations=st.lists(OPERATIONS, min_size=1, max_size=60))
def test_memory_of_a_rank_is_what_its_device_has_whatever_happens(limits, operations):
    bench = Bench(**limits)
    witness = Witness(bench)
    play(bench, operations)
    assert witness.memory.freeze(0.0).rows == ()


@pytest.mark.parametrize("seed", range(4))
def test_memory_of_a_rank_is_what_its_device_has_in_a_long_run_with_few_blocks(seed):
    """What is rare above: blocks are reused many times, prefixes return after their rows left, rows are preempted."""
    random = Random(seed)
    bench = Bench(block_size=3, num_blocks=18, max_num_seqs=6, max_num_batched_tokens=12, max_model_len=50)
    witness = Witness(bench)
    prompts = [[random.randrange(3) for _ in range(random.randrange(4, 14))] for _ in range(6)]
    for number in range(60):
        prompt = random.choice(prompts) + [random.randrange(3) for _ in range(random.randrange(3))]
        bench.add(make_request(f"r{number}", prompt, random.randrange(1, 16), n=random.choice([1, 1, 2])))
        for _ in range(random.randrange(8)):
            bench.turn()
        if random.random() < 0.1:
            bench.scheduler.finish(f"r{random.randrange(number + 1)}", FinishReason.ABORT)
        if random.random() < 0.05:
            bench.scheduler.forget_prefix_cache()
        if random.random() < 0.2:
            while bench.num_in_flight:
                bench.complete()
            bench.flush()
    bench.run()
    assert witness.num_resumed >= 3
    assert witness.num_forks >= 3
    assert len(witness.left) >= 60
    assert witness.num_cache_checks > 20
    assert any(plan.mode is PlanMode.APPLY_ONLY for plan in bench.plans)
