"""A worker's batch state, driven by hand-written deltas; digests by the formula of the protocol, from scratch."""

import copy
import re
from dataclasses import replace as replace_fields

import numpy as np
import pytest

from maniple.v1.scheduler_delta_pb2 import BlockChange, BlockIds, SchedulerDelta
from service_chassis.errors import DeltaRefused, OutOfOrder
from service_chassis.protocol.digest import MASK64, StateDigest, block_term, row_factor
from support.bad_deltas import SPOILERS
from worker_service.batch_state import BatchLimits, BatchState, DigestMismatch, RowState
from worker_service.step_work import Mode, TableOp

LIMITS = BatchLimits(
    max_num_seqs=6, max_num_batched_tokens=20, max_model_len=40, block_size=4, num_blocks=30, vocab_size=50
)
RUN, APPLY_ONLY = SchedulerDelta.MODE_RUN, SchedulerDelta.MODE_APPLY_ONLY


def digest_of(*rows):
    """The state digest of (row_key, computed tokens, one table per KV group)."""
    total = 0
    for key, num_computed, *tables in rows:
        c = row_factor(key)
        total += c * num_computed
        total += sum(
            block_term(c, group, i, block) for group, table in enumerate(tables) for i, block in enumerate(table)
        )
    return total & MASK64


def replace(*ids, kv_group=0):
    return BlockChange(kv_group=kv_group, replace=BlockIds(ids=ids))


def append(*ids, kv_group=0):
    return BlockChange(kv_group=kv_group, append=BlockIds(ids=ids))


def enter(delta, row, key, num_tokens, blocks, scheduled, **more):
    """Add a new request whose tokens are 1, 2, 3, ..."""
    if "fork_of" not in more:
        more["token_ids"] = range(1, num_tokens + 1)
    new = delta.new_requests.add(
        req_index=row,
        row_key=key,
        request_id=f"k{key}",
        n=more.pop("n", 1),
        num_prompt_tokens=num_tokens,
        num_prefill_tokens=num_tokens,
        num_scheduled_tokens=scheduled,
        blocks=blocks,
        **more,
    )
    new.sampling.top_p = new.sampling.repetition_penalty = 1
    return new


def delta_of(step, mode=RUN, rows=()):
    return SchedulerDelta(step=step, mode=mode, state_digest=digest_of(*rows))


def busy_state(limits=LIMITS):
    """A batch after three steps: row 0 decodes, row 1 is in its prefill, row 2 preempted, row 3 decodes; 4, 5 free."""
    state = BatchState(limits)
    first = delta_of(1, rows=[(10, 5, (1, 2)), (12, 3, (3,))])
    enter(first, 0, 10, 5, [replace(1, 2)], 5)
    enter(first, 2, 12, 3, [replace(3)], 3)
    state.apply(first)
    second = delta_of(2, rows=[(10, 6, (1, 2)), (12, 4, (3,)), (11, 8, (4, 5, 6)), (13, 2, (7,))])
    enter(second, 1, 11, 12, [replace(4, 5, 6)], 8)
    enter(second, 3, 13, 2, [replace(7)], 2)
    state.apply(second)
    third = delta_of(3, rows=[(10, 7, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 3, (7,))])
    third.preempted.append(2)
    state.apply(third)
    return state


def test_unmentioned_rows_advance_only_if_they_decode():
    state = busy_state()
    work = state.apply(delta_of(4, rows=[(10, 8, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 4, (7,))]))
    assert work.mode is Mode.RUN
    assert work.rows.tolist() == [0, 3]
    assert work.num_computed_tokens.tolist() == [7, 3]
    assert work.num_scheduled_tokens.tolist() == [1, 1]
    assert work.samples.tolist() == [True, True]
    facts = state.rows()
    assert [facts[row].state for row in range(4)] == [
        RowState.DECODE,
        RowState.PREFILL,
        RowState.PREEMPTED,
        RowState.DECODE,
    ]
    assert [facts[row].num_computed_tokens for row in range(4)] == [8, 8, 0, 4]
    assert [facts[row].num_known_tokens for row in range(4)] == [9, 12, 5, 5]


def test_work_of_an_earlier_step_is_not_touched_by_a_later_one():
    state = busy_state()
    work = state.apply(delta_of(4, rows=[(10, 8, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 4, (7,))]))
    kept = copy.deepcopy(work)
    later = delta_of(5, rows=[(10, 9, (1, 2, 8)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 5, (7, 9))])
    later.changes.add(req_index=0, blocks=[append(8)])
    later.changes.add(req_index=3, blocks=[append(9)])
    state.apply(later)
    for name in ("rows", "num_computed_tokens", "num_scheduled_tokens", "samples"):
        assert np.array_equal(getattr(work, name), getattr(kept, name))


def test_everything_at_once_is_applied_in_the_order_of_the_protocol():
    state = busy_state()
    # Row 3 finishes and is used again at once with its block; row 0 is preempted and comes back; 1 goes on; 2 resumes.
    delta = delta_of(4, rows=[(20, 2, (7, 9)), (10, 4, (10, 11)), (11, 12, (4, 5, 6)), (12, 5, (12, 13))])
    delta.finished.add(req_index=3, num_tokens=4, reason=1)
    delta.preempted.append(0)
    delta.block_copies.add(src_block_id=1, dst_block_id=9)
    enter(delta, 3, 20, 6, [replace(7, 9)], 2)
    delta.changes.add(
        req_index=0, num_scheduled_tokens=4, num_prefill_tokens=8, num_computed_tokens=0, blocks=[replace(10, 11)]
    )
    delta.changes.add(req_index=1, num_scheduled_tokens=4)
    delta.changes.add(
        req_index=2, num_scheduled_tokens=1, num_prefill_tokens=5, num_computed_tokens=4, blocks=[replace(12, 13)]
    )
    work = state.apply(delta)
    assert work.rows.tolist() == [0, 1, 2, 3]
    assert work.num_computed_tokens.tolist() == [0, 8, 4, 0]
    assert work.num_scheduled_tokens.tolist() == [4, 4, 1, 2]
    assert work.samples.tolist() == [False, True, True, False]
    assert [(f.req_index, f.num_tokens, f.reason) for f in work.finished] == [(3, 4, 1)]
    assert work.preempted == (0,)
    assert work.block_copies == ((0, 1, 9),)
    assert [(c.req_index, c.op, c.block_ids) for c in work.table_changes] == [
        (3, TableOp.REPLACE, (7, 9)),
        (0, TableOp.REPLACE, (10, 11)),
        (2, TableOp.REPLACE, (12, 13)),
    ]
    assert [new.token_ids.tolist() for new in work.new_rows] == [[1, 2, 3, 4, 5, 6]]
    # Rows 1 and 2 decode from now on, 0 and 3 do not.
    after = delta_of(5, rows=[(20, 2, (7, 9)), (10, 4, (10, 11)), (11, 13, (4, 5, 6, 14)), (12, 6, (12, 13))])
    after.changes.add(req_index=1, blocks=[append(14)])
    assert state.apply(after).rows.tolist() == [1, 2]


def test_paused_row_stands_still_for_one_step():
    state = busy_state()
    delta = delta_of(4, rows=[(10, 7, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 4, (7,))])
    delta.changes.add(req_index=0, num_scheduled_tokens=0)
    assert state.apply(delta).rows.tolist() == [3]
    after = delta_of(5, rows=[(10, 8, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 5, (7, 8))])
    after.changes.add(req_index=3, blocks=[append(8)])
    assert state.apply(after).num_computed_tokens.tolist() == [7, 4]


@pytest.mark.parametrize("mode", [APPLY_ONLY, SchedulerDelta.MODE_DUMMY])
def test_nobody_advances_in_a_step_of_bookkeeping(mode):
    state = busy_state()
    delta = delta_of(4, mode, rows=[(10, 7, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (21, 0, (8,))])
    delta.finished.add(req_index=3, num_tokens=3, reason=3)
    enter(delta, 5, 21, 3, [replace(8)], 0)
    work = state.apply(delta)
    assert work.mode in (Mode.APPLY_ONLY, Mode.DUMMY)
    assert work.rows.tolist() == []
    assert state.rows()[5].state is RowState.PREFILL


def test_fork_starts_with_the_tables_of_its_parent():
    state = busy_state()
    delta = delta_of(4, rows=[(10, 8, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 4, (7,)), (30, 4, (1, 2))])
    enter(delta, 4, 30, 5, [], 0, fork_of=0, num_computed_tokens=4, sample_index=1, n=2)
    work = state.apply(delta)
    assert work.new_rows[0].fork_of == 0
    assert work.new_rows[0].token_ids.tolist() == []
    assert [(c.req_index, c.op, c.block_ids) for c in work.table_changes] == [(4, TableOp.REPLACE, (1, 2))]


def test_several_kv_groups_have_tables_of_their_own():
    limits = BatchLimits(**{**{f: getattr(LIMITS, f) for f in LIMITS.__slots__}, "num_kv_groups": 3})
    state = BatchState(limits)
    delta = delta_of(1, rows=[(10, 6, (1, 2), (3, 4), ())])
    slot = BlockChange(kv_group=2, state_slot=5)
    enter(delta, 0, 10, 6, [replace(1, 2), replace(3, 4, kv_group=1), slot], 6)
    state.apply(delta)
    assert state.rows()[0].tables == ((1, 2), (3, 4), ())
    assert state.rows()[0].state_slots == ((2, 5),)
    state.apply(delta_of(2, rows=[(10, 7, (1, 2), (3, 4), ())]))
    # A sliding window drops its first block: the null block takes the place.
    third = delta_of(3, rows=[(10, 8, (1, 2), (0, 4), ())])
    third.changes.add(req_index=0, blocks=[BlockChange(kv_group=1, drop_leading=1)])
    state.apply(third)
    fourth = delta_of(4, rows=[(10, 9, (1, 2, 7), (0, 4), ())])
    fourth.changes.add(req_index=0, blocks=[append(7)])
    with pytest.raises(DeltaRefused, match="row 0: 8 computed and 1 scheduled token: its blocks hold 8"):
        state.apply(fourth)
    fourth.changes[0].blocks.append(append(8, kv_group=1))
    fourth.state_digest = digest_of((10, 9, (1, 2, 7), (0, 4, 8), ()))
    state.apply(fourth)


def test_row_may_fill_the_context_and_not_pass_it():
    state = BatchState(LIMITS)
    blocks = tuple(range(1, 12))
    delta = delta_of(1, rows=[(10, 20, blocks)])
    enter(delta, 0, 10, 38, [replace(*blocks)], 20)
    state.apply(delta)
    second = delta_of(2, rows=[(10, 38, blocks)])
    second.changes.add(req_index=0, num_scheduled_tokens=18)
    state.apply(second)
    state.apply(delta_of(3, rows=[(10, 39, blocks)]))  # computes the 39th token and samples the 40th
    with pytest.raises(DeltaRefused, match="row 0: 41 known tokens: at most max_model_len 40"):
        state.apply(delta_of(4, rows=[(10, 40, blocks)]))


def test_sum_over_unmentioned_rows_and_chunks_stays_within_the_budget():
    state = busy_state()
    delta = delta_of(4)
    enter(delta, 4, 40, 25, [replace(*range(10, 17))], 19)  # beside two decode rows
    with pytest.raises(DeltaRefused, match="num_scheduled_tokens=21: over all rows at most max_num_batched_tokens 20"):
        state.apply(delta)


def test_other_digest_is_an_error_of_its_own_and_the_step_not_accepted():
    state = busy_state()
    with pytest.raises(DigestMismatch, match=r"step 4: state_digest=0x0*7b: .*diverged"):
        state.apply(SchedulerDelta(step=4, mode=RUN, state_digest=123))
    assert state.accepted == 3


@pytest.mark.parametrize("step", [3, 5])
def test_step_that_is_not_due_is_refused_with_the_one_that_is(step):
    state = busy_state()
    with pytest.raises(OutOfOrder) as refused:
        state.apply(SchedulerDelta(step=step))
    assert refused.value.metadata == {"expected_step": "4"}


def test_bytes_that_are_no_delta_are_refused():
    with pytest.raises(DeltaRefused, match="3 bytes is not a well-formed SchedulerDelta"):
        BatchState(LIMITS).apply(b"\xff\xff\xff")


def variants():
    """Good deltas for the fourth step of ``busy_state``: between them they have everything that can be spoiled."""
    finishing = delta_of(4, rows=[(10, 8, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (20, 5, (8, 9))])
    finishing.finished.add(req_index=3, num_tokens=4)
    enter(finishing, 4, 20, 7, [replace(8, 9)], 5)
    resuming = delta_of(4, rows=[(10, 8, (1, 2)), (11, 8, (4, 5, 6)), (12, 5, (12, 13)), (13, 4, (7,))])
    resuming.changes.add(
        req_index=2, num_scheduled_tokens=1, num_prefill_tokens=5, num_computed_tokens=4, blocks=[replace(12, 13)]
    )
    return [finishing, resuming]


def variant_states():
    """The same, and a state in which a decode row needs a block."""
    cases = [(busy_state(), delta) for delta in variants()]
    state = busy_state()
    state.apply(delta_of(4, rows=[(10, 8, (1, 2)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 4, (7,))]))
    growing = delta_of(5, rows=[(10, 9, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 5, (7, 21))])
    growing.changes.add(req_index=0, blocks=[append(20)])
    growing.changes.add(req_index=3, blocks=[append(21)])
    state_of_tries = trying_state()
    settled = delta_of(5, rows=[(10, 11, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 5, (7, 21))])
    settled.changes.add(req_index=3, blocks=[append(21)])
    return [*cases, (state, growing), (state_of_tries, settled)]


def trying_state():
    """The busy state after a fourth step, in which row 0 tried two tokens ahead."""
    state = busy_state(replace_fields(LIMITS, num_speculative_tokens=2))
    delta = delta_of(4, rows=[(10, 10, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 4, (7,))])
    delta.changes.add(req_index=0, num_scheduled_tokens=3, blocks=[append(20)])
    work = state.apply(delta)
    assert work.rows.tolist() == [0, 3]
    assert work.num_computed_tokens.tolist() == [7, 3]
    assert work.num_scheduled_tokens.tolist() == [3, 1]
    assert (work.speculation.rows, work.speculation.settled) == ((0,), ())
    return state


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_row_that_tried_ahead_is_taken_back_to_what_was_accepted(num_accepted):
    state = trying_state()
    after = delta_of(5, rows=[(10, 9 + num_accepted, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 5, (7, 21))])
    if num_accepted < 2:
        after.changes.add(req_index=0, num_computed_tokens=8 + num_accepted)
    after.changes.add(req_index=3, blocks=[append(21)])
    work = state.apply(after)
    assert work.num_computed_tokens.tolist() == [8 + num_accepted, 4]
    assert work.num_scheduled_tokens.tolist() == [1, 1]
    assert (work.speculation.rows, work.speculation.settled) == ((), (0,))
    rows = [(10, 10 + num_accepted, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 6, (7, 21))]
    assert state.apply(delta_of(6, rows=rows)).speculation is None


def test_row_may_try_ahead_while_it_is_taken_back():
    state = trying_state()
    after = delta_of(5, rows=[(10, 11, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 5, (7, 21))])
    after.changes.add(req_index=0, num_scheduled_tokens=3, num_computed_tokens=8)
    after.changes.add(req_index=3, blocks=[append(21)])
    work = state.apply(after)
    assert work.num_computed_tokens.tolist() == [8, 4]
    assert work.num_scheduled_tokens.tolist() == [3, 1]
    assert (work.speculation.rows, work.speculation.settled) == ((0,), (0,))


def test_pause_and_bookkeeping_leave_open_how_much_was_accepted():
    state = trying_state()
    rows = [(10, 10, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 4, (7,))]
    state.apply(delta_of(5, mode=APPLY_ONLY, rows=rows))
    paused = delta_of(6, rows=[*rows[:3], (13, 5, (7, 21))])
    paused.changes.add(req_index=0, num_scheduled_tokens=0)
    paused.changes.add(req_index=3, blocks=[append(21)])
    assert state.apply(paused).speculation.settled == ()
    on = delta_of(7, rows=[(10, 9, (1, 2, 20)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 6, (7, 21))])
    on.changes.add(req_index=0, num_computed_tokens=8)
    assert state.apply(on).speculation.settled == (0,)


@pytest.mark.parametrize("num_known", [8, 9, 10, 11, 12])
def test_preempted_row_comes_back_with_any_number_of_tokens_that_may_have_been_accepted(num_known):
    state = trying_state()
    gone = delta_of(5, rows=[(10, 0, ()), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 5, (7, 21))])
    gone.preempted.append(0)
    gone.changes.add(req_index=3, blocks=[append(21)])
    state.apply(gone)
    back = delta_of(6, rows=[(10, 4, (22, 23, 24)), (11, 8, (4, 5, 6)), (12, 0, ()), (13, 6, (7, 21))])
    back.changes.add(
        req_index=0,
        num_prefill_tokens=num_known,
        num_computed_tokens=0,
        num_scheduled_tokens=4,
        blocks=[replace(22, 23, 24)],
    )
    if num_known in (9, 10, 11):  # one was sampled anyway, and two were tried
        state.apply(back)
        assert state.rows()[0].num_prefill_tokens == num_known
    else:
        with pytest.raises(DeltaRefused, match=f"num_prefill_tokens={num_known}: must be the 9 to 11 tokens it knows"):
            state.apply(back)


def everything_in(state):
    return {name: copy.deepcopy(value) for name, value in vars(state).items() if name != "_steady"}


def same(a, b):
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, StateDigest):
        contents = [
            (d.value, d._steady, {row: (r.c, r.advance, r.terms) for row, r in d._rows.items()}) for d in (a, b)
        ]
        return contents[0] == contents[1]
    return a == b


def test_variants_are_good_deltas():
    for state, delta in variant_states():
        state.apply(delta)


@pytest.mark.parametrize("name", SPOILERS)
def test_content_refusal_names_the_rule_and_changes_nothing(name):
    spoiler, sentence = SPOILERS[name]
    spoiled = 0
    for state, good in variant_states():
        bad = SchedulerDelta.FromString(good.SerializeToString())
        if not spoiler(bad, state):
            continue
        spoiled += 1
        before = everything_in(state)
        with pytest.raises(DeltaRefused) as refused:
            state.apply(bad)
        assert not isinstance(refused.value, DigestMismatch)
        assert re.search(sentence, refused.value.message), refused.value.message
        assert refused.value.message.startswith(f"step {good.step}: ")
        after = everything_in(state)
        assert before.keys() == after.keys()
        assert all(same(before[field], after[field]) for field in before)
        state.apply(good)  # and it goes on as if nothing had come
    assert spoiled, "no variant offers anything to this spoiler"
