"""What the scheduler decides: budget, chunks, order, admission, priorities, deadlines, prefix hits, forks."""

import sys
from itertools import pairwise

import pytest

from control_plane.scheduling.request import FinishReason, RefusalKind, SampleState
from service_chassis.ids import RequestId
from support.slot_hash_worker import Bench, make_request


def tokens_of(plan):
    """Scheduled tokens by row, where the plan says them."""
    said = {new.req_index: new.num_scheduled_tokens for new in plan.new_rows}
    return said | {c.req_index: c.num_scheduled_tokens for c in plan.changes if c.num_scheduled_tokens is not None}


def prompt(length, first=1):
    return [(first + 7 * place) % 97 for place in range(length)]


def test_schedule_splits_a_long_prompt_into_chunks_of_the_budget():
    bench = Bench(max_num_batched_tokens=29, max_steps_in_flight=4)
    request = bench.add(make_request("a", prompt(75), 3))
    plans = [bench.send() for _ in range(3)]
    assert [tokens_of(plan) for plan in plans] == [{0: 29}, {0: 29}, {0: 17}]
    assert [plan.rows for plan in plans] == [(), (), (0,)]
    bench.run()
    bench.check_outputs([request])


def test_schedule_never_exceeds_the_budget_and_serves_decodes_first():
    bench = Bench(max_num_batched_tokens=13, max_num_seqs=5)
    requests = [bench.add(make_request(f"r{n}", prompt(11 + n, n), 9)) for n in range(8)]
    bench.run()
    assert max(plan.num_tokens for plan in bench.plans) == 13
    for before, plan in pairwise(bench.plans):
        ended = {end.req_index for end in plan.finished}
        assert {*before.rows} - ended <= {*plan.rows}, "a decode row was left out"
    bench.check_outputs(requests)


def test_schedule_does_not_mention_decode_rows_when_nothing_happens():
    bench = Bench(block_size=16, num_blocks=50)
    for number in range(4):
        bench.add(make_request(f"r{number}", prompt(3, number), 60))
    bench.turn()
    plan = bench.send()
    assert plan.rows == (0, 1, 2, 3)
    assert plan.num_tokens == 4
    assert (plan.changes, plan.new_rows, plan.finished) == ((), (), ())
    following = bench.plans[-1], bench.complete() and bench.send()
    assert following[0].rows is following[1].rows, "the tuple of rows is shared while it does not change"


def test_schedule_appends_one_block_at_a_boundary():
    bench = Bench(block_size=4)
    bench.add(make_request("a", prompt(6), 12))
    bench.run()
    appends = [(plan.step, change) for plan in bench.plans for change in plan.changes if change.append]
    # 6 prompt tokens fill 1.5 blocks; computing token 8, 12 and 16 begins a block.
    assert [step for step, _ in appends] == [4, 8, 12]
    assert all(len(change.append) == 1 and change.num_scheduled_tokens is None for _, change in appends)
    assert [change.append_at for _, change in appends] == [2, 3, 4]


def count_lines(function):
    """Return how many lines of Python ``function`` executes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def steady_lines(num_running, num_waiting):
    bench = Bench(check=False, max_num_seqs=num_running, max_num_batched_tokens=2048, block_size=64, num_blocks=1000)
    for number in range(num_running):
        bench.add(make_request(f"r{number}", prompt(2, number), 60))
    for number in range(num_waiting):
        bench.add(make_request(f"w{number}", prompt(20, number), 5))
    bench.turn()
    bench.turn()
    return count_lines(lambda: bench.scheduler.schedule(0.0))


def test_schedule_executes_the_same_lines_whatever_decodes_or_waits():
    few = steady_lines(2, 0)
    assert few == steady_lines(200, 0)
    with_ten = steady_lines(20, 10)
    assert with_ten == steady_lines(20, 1000)
    assert with_ten < few + 20


def test_schedule_does_not_look_again_at_a_request_that_found_no_room():
    def lines(prompt_length):
        bench = Bench(check=False, num_blocks=40, block_size=4, max_model_len=150, max_num_seqs=3)
        bench.add(make_request("runs", prompt(20), 60))
        bench.turn()
        bench.add(make_request("waits", prompt(prompt_length, 9), 4))
        bench.turn()
        assert bench.scheduler.num_waiting == 1
        return count_lines(lambda: bench.scheduler.schedule(0.0))

    assert lines(140) == lines(145)


def test_admission_goes_by_arrival_within_a_priority():
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=40)
    names = {"late": (1, 5.0), "early": (1, 2.0), "urgent": (0, 9.0), "same": (1, 2.0)}
    for name, (priority, arrival) in names.items():
        bench.add(make_request(name, prompt(5), 2, priority=priority, arrival=arrival))
    bench.run()
    started = [request.request_id for plan in bench.plans for request in plan.started]
    assert started == ["urgent", "early", "same", "late"]


def test_urgent_prompt_overtakes_a_half_computed_one():
    bench = Bench(max_num_batched_tokens=20, max_steps_in_flight=1)
    slow = bench.add(make_request("slow", prompt(90), 2, priority=1))
    bench.turn()
    quick = bench.add(make_request("quick", prompt(16, 5), 2, priority=0))
    assert tokens_of(bench.send()) == {0: 4, 1: 16}
    bench.complete()
    bench.run()
    bench.check_outputs([slow, quick])


def test_large_request_is_not_starved_when_small_ones_keep_coming():
    bench = Bench(num_blocks=21, block_size=4, max_model_len=80, max_num_seqs=6)
    for number in range(4):
        bench.add(make_request(f"first{number}", prompt(8, number), 8))
    large = bench.add(make_request("large", prompt(70), 4))
    for number in range(60):
        if large.started:
            break
        bench.add(make_request(f"small{number}", prompt(4, number), 4))
        bench.turn()
    assert large.started
    bench.run()
    bench.check_outputs([large])


def test_admission_leaves_a_block_for_every_sample_that_runs():
    bench = Bench(num_blocks=14, block_size=4, max_model_len=40, max_num_batched_tokens=64)
    for number in range(2):
        bench.add(make_request(f"r{number}", prompt(10, number), 20))
    bench.turn()  # each takes three blocks of thirteen
    bench.add(make_request("six", prompt(22, 5), 5))
    bench.add(make_request("one", prompt(3, 7), 5))
    bench.turn()
    assert bench.plans[-1].new_rows == ()  # seven are left, six asked, two must stay
    bench.scheduler.finish(RequestId("six"), FinishReason.ABORT)
    bench.turn()
    assert [new.sample.request.request_id for new in bench.plans[-1].new_rows] == ["one"]


def test_nobody_is_admitted_by_a_step_that_preempted():
    bench = Bench(num_blocks=14, block_size=4, max_model_len=50, max_num_batched_tokens=60)
    requests = [bench.add(make_request(f"r{n}", prompt(9, n), 30)) for n in range(5)]
    bench.run()
    preempting = [plan for plan in bench.plans if plan.preempted]
    assert preempting
    for plan in preempting:
        assert not plan.new_rows
        assert not any(change.replace for change in plan.changes)
    bench.check_outputs(requests)


def test_preemption_takes_the_youngest_of_the_lowest_priority():
    bench = Bench(num_blocks=16, block_size=4, max_model_len=60, max_num_batched_tokens=64, max_steps_in_flight=1)
    for name, priority in (("old", 1), ("young", 1), ("urgent", 0)):
        bench.add(make_request(name, prompt(14), 40, priority=priority, skip_reading_prefix_cache=True))
    rows = {}
    while not bench.plans or not bench.plans[-1].preempted:
        bench.turn()
        rows |= {new.req_index: new.sample.request.request_id for new in bench.plans[-1].new_rows}
    assert [rows[loss.req_index] for loss in bench.plans[-1].preempted] == ["young"]


def test_preempted_row_keeps_its_place_and_computes_all_its_tokens_again():
    bench = Bench(num_blocks=12, block_size=4, max_model_len=45, max_num_batched_tokens=64)  # E2
    requests = [bench.add(make_request(f"r{n}", prompt(10, n), 25)) for n in range(3)]
    row_of, resumed = {}, 0

    def look(plan, delta):
        nonlocal resumed
        row_of.update({new.req_index: new.sample.request for new in plan.new_rows})
        for change in plan.changes:
            if change.replace:
                resumed += 1
                assert not change.append
                known = 10 + len(bench.outputs[row_of[change.req_index], 0])
                assert change.num_computed_tokens + change.num_scheduled_tokens == known == change.num_prefill_tokens
                assert len(change.replace) == -(-known // 4)

    bench.on_plan = look
    while bench.scheduler.has_work() or bench.num_in_flight:
        bench.turn()
    assert resumed == bench.scheduler.num_preemptions >= 2
    bench.check_outputs(requests)


def test_sample_alone_ends_by_length_when_its_cache_is_full():
    bench = Bench(num_blocks=6, block_size=4, max_model_len=120)
    request = bench.add(make_request("a", prompt(13), 90))
    bench.run()
    # Five blocks hold 20 tokens; one more is sampled and never computed.
    assert len(bench.outputs[request, 0]) == 8
    assert bench.reasons[request, 0] is FinishReason.LENGTH
    assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("length", "limits", "kind"),
    [
        (64, {"max_model_len": 64}, RefusalKind.TOO_LONG),
        (90, {"max_model_len": 64}, RefusalKind.TOO_LONG),
        (41, {"num_blocks": 11}, RefusalKind.NEEDS_MORE_BLOCKS),
    ],
    ids=["E7-prompt-equals-context", "E7-prompt-beyond-context", "E7-more-blocks-than-exist"],
)
def test_refusal_says_why_and_the_next_request_works(length, limits, kind):
    bench = Bench(**limits)
    refusal = bench.scheduler.refusal(make_request("big", prompt(length), 5))
    assert refusal is not None
    assert refusal.kind is kind
    assert str(length) in refusal.sentence or str(-(-length // 4)) in refusal.sentence
    following = bench.add(make_request("next", prompt(40 if "num_blocks" in limits else 63), 1))
    bench.run()
    bench.check_outputs([following])


def test_refusal_names_the_full_queue_until_a_request_starts():
    bench = Bench(max_num_waiting=3)
    for number in range(3):
        bench.add(make_request(f"r{number}", prompt(5, number), 4))
    refusal = bench.scheduler.refusal(make_request("more", prompt(5), 4))
    assert refusal is not None
    assert refusal.kind is RefusalKind.QUEUE_FULL
    bench.turn()
    assert bench.scheduler.refusal(make_request("more", prompt(5), 4)) is None


def test_second_request_of_a_living_id_is_refused_and_the_first_unaffected():
    bench = Bench()  # C6
    first = bench.add(make_request("same", prompt(9), 8))
    bench.turn()
    refusal = bench.scheduler.refusal(make_request("same", prompt(4), 3))
    assert refusal is not None
    assert refusal.kind is RefusalKind.DUPLICATE
    bench.run()
    bench.check_outputs([first])


def test_expired_requests_are_returned_once_in_order_and_freed():
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=16)
    for name, deadline in (("late", 30.0), ("soon", 10.0), ("never", None), ("sooner", 5.0)):
        bench.add(make_request(name, prompt(6), 50, deadline=deadline))
    bench.turn()
    assert bench.scheduler.next_deadline() == 5.0
    assert bench.scheduler.expired(4.9) == []
    expired = bench.scheduler.expired(12.0)
    assert expired == ["sooner", "soon"]
    assert bench.scheduler.expired(12.0) == []
    for request_id in expired:
        assert bench.scheduler.finish(request_id, FinishReason.DEADLINE)
    assert bench.scheduler.next_deadline() == 30.0
    plan = bench.send(12.0)
    assert [end.reason for end in plan.finished] == [FinishReason.DEADLINE]
    bench.scheduler.finish(RequestId("late"), FinishReason.ABORT)
    assert bench.scheduler.next_deadline() is None


def test_new_row_carries_what_is_left_of_its_deadline():
    bench = Bench()
    bench.add(make_request("a", prompt(4), 2, deadline=7.5))
    bench.add(make_request("b", prompt(4), 2))
    bench.add(make_request("c", prompt(4), 2, deadline=1.0))
    plan = bench.send(5.25)
    assert [new.deadline_ms for new in plan.new_rows] == [2250, 0, 1]


@pytest.mark.parametrize("deadline", [4.3e6, 1e30, float("inf")])
def test_new_row_says_the_longest_wait_there_is_when_its_deadline_is_farther(deadline):
    bench = Bench()
    request = bench.add(make_request("a", prompt(4), 2, deadline=deadline))
    plan = bench.send(0.0)  # encodes it
    assert [new.deadline_ms for new in plan.new_rows] == [2**32 - 1]
    bench.run()
    bench.check_outputs([request])


def test_rows_enter_in_later_steps_when_their_delta_would_grow_too_large():
    bench = Bench(max_new_row_bytes=1000, max_steps_in_flight=9)
    for name, num_bytes in (("a", 400), ("b", 400), ("c", 5000), ("d", 400), ("e", 10)):
        bench.add(make_request(name, prompt(4), 9, payload_bytes=num_bytes))
    entering = [[new.sample.request.request_id for new in bench.send().new_rows] for _ in range(4)]
    assert entering == [["a", "b"], ["c"], ["d", "e"], []]


def test_prompts_are_computed_in_parts_whose_results_fit_into_messages():
    bench = Bench(max_result_entries=20, max_num_batched_tokens=16, max_steps_in_flight=9)
    requests = [
        bench.add(make_request("a", prompt(12), 3, result_entries=3)),
        bench.add(make_request("b", prompt(7, 2), 3, result_entries=10)),
        bench.add(make_request("c", prompt(5, 3), 3)),
    ]
    chunks = [tokens_of(bench.send()) for _ in range(5)]
    # Six tokens of three, or two of ten, fill a message; who waits for room holds up those behind it, as for blocks.
    assert chunks == [{0: 6}, {0: 6}, {1: 2, 2: 5}, {1: 2}, {1: 2}]
    bench.run()
    bench.check_outputs(requests)


# --- prefix cache


def test_second_request_finds_the_prompt_of_the_first():
    bench = Bench()
    first = bench.add(make_request("a", prompt(22), 3))
    bench.run()
    second = bench.add(make_request("b", [*prompt(22), 5, 6], 3))
    plan = bench.send()
    assert plan.new_rows[0].num_computed_tokens == 20
    assert second.num_cached_tokens == 20
    assert plan.new_rows[0].block_ids[:5] == bench.plans[0].new_rows[0].block_ids[:5]
    bench.run()
    assert (bench.scheduler.prefix_queries, bench.scheduler.prefix_hits) == (46, 20)
    bench.check_outputs([first, second])


def test_prompt_of_whole_blocks_still_computes_one_token_when_sent_twice():
    bench = Bench()  # E4
    requests = [bench.add(make_request("a", prompt(24), 3))]
    bench.run()
    requests.append(bench.add(make_request("b", prompt(24), 3)))
    assert tokens_of(bench.send()) == {0: 4}
    assert requests[1].num_cached_tokens == 20
    bench.run()
    bench.check_outputs(requests)


def test_output_of_a_request_is_found_by_the_next_turn_of_a_conversation():
    bench = Bench(max_steps_in_flight=1)  # deeper, a block filled by the very last steps is not named in time
    first = bench.add(make_request("a", prompt(10), 15))
    bench.run()
    second = bench.add(make_request("b", [*prompt(10), *bench.outputs[first, 0], 3, 4, 5], 3))
    bench.turn()
    # 25 known tokens of which the last was never computed.
    assert second.num_cached_tokens == 24
    bench.run()
    bench.check_outputs([first, second])


def test_block_is_no_hit_before_the_step_that_computes_it_is_answered():
    bench = Bench(max_steps_in_flight=4, max_num_batched_tokens=64)
    bench.add(make_request("a", prompt(16), 5))
    bench.send()
    bench.add(make_request("b", [*prompt(16), 1], 5))
    assert bench.send().new_rows[0].num_computed_tokens == 0
    bench.complete()
    bench.add(make_request("c", [*prompt(16), 2], 5))
    assert bench.send().new_rows[0].num_computed_tokens == 16


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_equal_prompt_computes_for_itself_when_the_first_is_aborted_in_its_prefill(depth):
    bench = Bench(max_num_batched_tokens=20, max_steps_in_flight=depth)  # E3
    bench.add(make_request("a", prompt(50), 5))
    second = bench.add(make_request("b", prompt(50), 9))
    bench.send()
    bench.scheduler.finish(RequestId("a"), FinishReason.ABORT)
    bench.run()
    bench.check_outputs([second])


def test_blocks_of_a_short_request_are_hits_although_it_left_before_its_result_came():
    bench = Bench(max_steps_in_flight=2)
    bench.add(make_request("a", prompt(17), 1))
    bench.send()
    assert bench.send() is None  # its only token is planned: the row is gone
    bench.complete()
    second = bench.add(make_request("b", prompt(17), 1))
    bench.run()
    assert second.num_cached_tokens == 16


def test_namespaces_share_no_blocks():
    bench = Bench()
    requests = [bench.add(make_request("a", prompt(20), 2, cache_namespace=b"x" * 16))]
    bench.run()
    for name, namespace in (("b", b"y" * 16), ("c", b""), ("d", b"x" * 16)):
        requests.append(bench.add(make_request(name, prompt(20), 2, cache_namespace=namespace)))
        bench.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 16]


def test_request_that_wants_every_prompt_token_computed_reads_no_cache_and_fills_it():
    bench = Bench()
    bench.add(make_request("a", prompt(20), 2, skip_reading_prefix_cache=True))
    bench.run()
    again = bench.add(make_request("b", prompt(20), 2, skip_reading_prefix_cache=True))
    bench.run()
    assert again.num_cached_tokens == 0
    reader = bench.add(make_request("c", prompt(20), 2))
    bench.run()
    assert reader.num_cached_tokens == 16
    assert (bench.scheduler.prefix_queries, bench.scheduler.prefix_hits) == (20, 16)


def test_nothing_is_cached_when_caching_is_off():
    bench = Bench(enable_prefix_caching=False)
    requests = []
    for name in "ab":
        requests.append(bench.add(make_request(name, prompt(20), 2)))
        bench.run()
    assert bench.scheduler.num_cached_blocks == 0
    assert requests[1].num_cached_tokens == 0
    bench.check_outputs(requests)


def test_forgetting_the_prefix_cache_is_said_to_the_workers_and_ends_hits():
    bench = Bench()
    bench.add(make_request("a", prompt(20), 2))
    bench.run()
    assert bench.scheduler.num_cached_blocks == 5
    bench.scheduler.forget_prefix_cache()
    assert bench.scheduler.num_cached_blocks == 0
    assert bench.scheduler.has_unflushed()
    again = bench.add(make_request("b", prompt(20), 2))
    assert bench.send().forget_prefix_cache
    assert not bench.send().forget_prefix_cache
    assert again.num_cached_tokens == 0


def test_cached_blocks_are_evicted_least_recently_used_first():
    bench = Bench(num_blocks=16, max_model_len=60)
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        bench.add(make_request(name, prompt(16, first), 1))
        bench.run()
    bench.add(make_request("a2", prompt(17, 1), 1))  # touches a
    bench.run()
    bench.add(make_request("d", prompt(24, 9), 1))  # six blocks: three free ones, then of b from its tail
    bench.run()
    hits = {}
    for name, first in (("a", 1), ("c", 3), ("b", 2)):
        request = bench.add(make_request(f"{name}3", prompt(17, first), 1))
        bench.send()
        hits[name] = request.num_cached_tokens
        bench.run()
    assert hits["a"] == hits["c"] == 16
    assert hits["b"] < 16


# --- several samples


def test_samples_fork_from_the_first_when_it_is_through_the_prompt():
    bench = Bench(max_num_batched_tokens=16, max_steps_in_flight=4)
    request = bench.add(make_request("a", prompt(22), 6, n=3))
    plans = [bench.send() for _ in range(3)]
    assert [len(plan.new_rows) for plan in plans] == [1, 0, 2]
    first = plans[0].new_rows[0]
    for fork in plans[2].new_rows:
        assert (fork.fork_of, fork.token_ids) == (0, ())
        assert (fork.num_computed_tokens, fork.num_prefill_tokens, fork.num_scheduled_tokens) == (21, 22, 1)
        assert fork.block_ids[:5] == first.block_ids[:5]
        assert fork.block_ids[5] != first.block_ids[5]
    assert [copy.src for copy in plans[2].block_copies] == [first.block_ids[5]] * 2
    assert [copy.dst for copy in plans[2].block_copies] == [fork.block_ids[5] for fork in plans[2].new_rows]
    bench.run()
    bench.check_outputs([request])
    assert len({tuple(bench.outputs[request, index]) for index in range(3)}) == 3
    bench.check_empty()


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_forks_never_write_shared_blocks_when_prompts_end_anywhere_in_a_block(length, depth):
    bench = Bench(max_steps_in_flight=depth)
    requests = [bench.add(make_request("a", prompt(length), 11, n=4)), bench.add(make_request("b", prompt(9), 11))]
    bench.run()
    bench.check_outputs(requests)
    assert any(new.fork_of is not None for plan in bench.plans for new in plan.new_rows)


def test_samples_are_admitted_by_themselves_when_the_first_is_gone():
    bench = Bench(max_num_batched_tokens=16)
    request = bench.add(make_request("a", prompt(22), 6, n=3))
    bench.turn()
    assert bench.scheduler.finish(request.request_id, FinishReason.STOP, sample_index=0)
    bench.run()
    news = [new for plan in bench.plans for new in plan.new_rows]
    assert [new.sample.index for new in news] == [0, 1, 2]
    assert [len(new.token_ids) for new in news] == [22, 22, 22]
    assert bench.outputs[request, 0] == []
    assert bench.reasons.keys() == {(request, 1), (request, 2)}


def test_samples_of_one_token_each_are_all_served():
    bench = Bench()
    request = bench.add(make_request("a", prompt(22), 1, n=4))
    bench.run()
    bench.check_outputs([request])
    bench.check_empty()


# --- pause


def test_paused_request_is_mentioned_with_no_tokens_and_goes_on_where_it_was():
    bench = Bench(block_size=4)
    requests = [bench.add(make_request(name, prompt(6, first), 25)) for name, first in (("a", 1), ("b", 2))]
    bench.turn()
    assert bench.scheduler.set_paused(RequestId("a"), True)
    # Long enough for block boundaries to pass on both.
    for _ in range(7):
        bench.turn()
        plan = bench.plans[-1]
        assert tokens_of(plan) == {0: 0}
        assert plan.rows == (1,)
    bench.scheduler.set_paused(RequestId("a"), False)
    bench.run()
    bench.check_outputs(requests)
    assert not bench.scheduler.set_paused(RequestId("a"), True)


def test_paused_request_does_not_hold_up_those_behind_it_when_it_waits():
    bench = Bench(max_num_batched_tokens=16)
    first, second = (bench.add(make_request(name, prompt(20), 4, n=2)) for name in "ab")
    bench.scheduler.set_paused(RequestId("a"), True)
    while second.num_live:
        assert bench.turn() or bench.num_in_flight or bench.plans
    assert not first.started
    assert bench.send() is None
    assert bench.scheduler.has_work()
    bench.scheduler.set_paused(RequestId("a"), False)
    bench.run()
    bench.check_outputs([first, second])


def test_paused_prefill_stands_still():
    bench = Bench(max_num_batched_tokens=16)
    request = bench.add(make_request("a", prompt(40), 4))
    bench.turn()
    bench.scheduler.set_paused(RequestId("a"), True)
    while bench.num_in_flight:
        bench.complete()
    assert bench.send() is None
    assert request.samples[0].state is SampleState.PREFILL
    bench.scheduler.set_paused(RequestId("a"), False)
    bench.run()
    bench.check_outputs([request])
