"""The contract between scheduler and workers: whatever happens, both ends hold the same batch after every delta.

Hypothesis chooses the limits and the traffic. Every delta is applied by a worker's batch state, which is then compared
with the scheduler's own view, digests included (``Bench`` with ``check``); on the way, spoiled copies of the deltas
must be refused and change nothing; the log of all deltas, replayed alone, must lead to the same state.

The examples are the same in every run. To search for new ones, take ``derandomize`` out and raise ``max_examples``.
"""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from service_chassis.errors import DeltaRefused, OutOfOrder
from support.bad_deltas import SPOILERS
from support.delta_traffic import LIMITS, OPERATIONS, play
from support.slot_hash_worker import Bench, rows_of
from worker_service.batch_state import BatchState, DigestMismatch


@settings(max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, operations=st.lists(OPERATIONS, min_size=1, max_size=60), caching=st.booleans())
def test_both_ends_hold_the_same_batch_whatever_happens(limits, operations, caching):
    bench = Bench(enable_prefix_caching=caching, **limits)
    log = []
    bench.on_plan = lambda plan, raw: log.append(raw)
    requests = play(bench, operations)
    bench.check_empty()
    bench.check_outputs(requests)
    replica = BatchState(bench.state.limits)
    for raw in log:
        replica.apply(raw)
    assert replica.digest == bench.state.digest == 0
    assert replica.accepted == bench.state.accepted == len(log)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    limits=LIMITS,
    operations=st.lists(OPERATIONS, min_size=5, max_size=40),
    names=st.lists(st.sampled_from(sorted(SPOILERS)), min_size=1, max_size=12),
)
def test_refused_deltas_change_nothing_whatever_happens(limits, operations, names):
    bench = Bench(**limits)
    turn = 0

    def spoil(plan, raw):
        nonlocal turn
        state = bench.state
        before = rows_of(state), state.digest, state.accepted
        for name in (names[turn % len(names)], names[(turn * 7 + 3) % len(names)]):
            spoiler, sentence = SPOILERS[name]
            bad = SchedulerDelta.FromString(raw)
            if spoiler(bad, state):
                with pytest.raises(DeltaRefused) as refused:
                    state.apply(bad)
                assert not isinstance(refused.value, DigestMismatch)
                assert re.search(sentence, refused.value.message), (name, refused.value.message)
        for step in (plan.step - 1, plan.step + 1):  # a repetition and a gap
            with pytest.raises(OutOfOrder):
                state.apply(_with_step(raw, step))
        assert (rows_of(state), state.digest, state.accepted) == before
        turn += 1

    bench.on_plan = spoil
    play(bench, operations)
    bench.check_empty()


def _with_step(raw, step):
    delta = SchedulerDelta.FromString(raw)
    delta.step = step
    return delta


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, operations=st.lists(OPERATIONS, min_size=8, max_size=40), at=st.integers(0, 30))
def test_one_flipped_block_id_is_seen_by_the_next_digest(limits, operations, at):
    """A8, as far as it is the deltas' business."""
    bench = Bench(**limits)
    log = []
    bench.on_plan = lambda plan, raw: log.append(raw)
    play(bench, operations)
    replica = BatchState(bench.state.limits)
    candidates = 0
    for raw in log:
        delta = SchedulerDelta.FromString(raw)
        tables = [new.blocks[0].replace for new in delta.new_requests]
        tables += [getattr(c.blocks[0], c.blocks[0].WhichOneof("change")) for c in delta.changes if c.blocks]
        if tables:
            candidates += 1
            if candidates > at:
                last = tables[-1].ids[-1]
                tables[-1].ids[-1] = last % (limits["num_blocks"] - 1) + 1
                assert tables[-1].ids[-1] != last
                with pytest.raises(DigestMismatch):
                    replica.apply(delta)
                return
        replica.apply(raw)
