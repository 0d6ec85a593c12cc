"""What happens while results are on their way: overshoot, limits, aborts at every moment, flushes, wrong results."""

import pytest

from control_plane.scheduling.plan import PlanMode, ResultMismatch, StepTokens
from control_plane.scheduling.request import FinishReason, SampleState
from service_chassis.ids import RequestId, Step
from support.slot_hash_worker import Bench, make_request, solo

DEPTHS = [1, 2, 4]


def prompt(length, first=1):
    return [(first + 7 * place) % 97 for place in range(length)]


def is_free(bench):
    scheduler = bench.scheduler
    scheduler.check_integrity()
    return (
        scheduler.num_running == scheduler.num_waiting == 0
        and scheduler.num_free_blocks + scheduler.num_cached_blocks == bench.limits.num_blocks - 1
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_more_steps_than_allowed_are_outstanding(depth):
    bench = Bench(max_steps_in_flight=depth)
    bench.add(make_request("a", prompt(5), 20))
    sent = 0
    while bench.send() is not None:
        sent += 1
    assert sent == depth == bench.scheduler.num_outstanding
    bench.complete()
    assert bench.send() is not None
    assert bench.send() is None


@pytest.mark.parametrize("depth", DEPTHS)
def test_length_limit_is_known_when_planning_and_nothing_is_computed_past_it(depth):
    bench = Bench(max_steps_in_flight=depth)
    request = bench.add(make_request("a", prompt(5), 7))
    bench.run()
    assert len([plan for plan in bench.plans if plan.mode is PlanMode.RUN]) == 7
    assert sum(len(plan.rows) for plan in bench.plans) == 7
    assert bench.plans[-1].finished[0].num_tokens == 12
    bench.check_outputs([request])


@pytest.mark.parametrize("depth", DEPTHS)
def test_row_that_reaches_its_limit_leaves_with_the_very_next_delta(depth):
    bench = Bench(max_steps_in_flight=depth)
    bench.add(make_request("a", prompt(5), 3))
    other = bench.add(make_request("b", prompt(5, 2), 20))
    bench.run()
    last = max(index for index, plan in enumerate(bench.plans) if len(plan.rows) == 2)
    assert [end.reason for end in bench.plans[last + 1].finished] == [FinishReason.LENGTH]
    bench.check_outputs([other])


def test_context_limit_ends_a_request_although_its_min_tokens_are_not_reached():
    bench = Bench(max_model_len=64)  # E6
    request = bench.add(make_request("a", prompt(60), 30, min_tokens=20, stop_ids=frozenset(range(0, 97, 2))))
    bench.run()
    assert len(bench.outputs[request, 0]) == 4
    assert bench.reasons[request, 0] is FinishReason.LENGTH


def stopping_request(name, after):
    """A request that meets a stop id as its ``after``-th token."""
    probe = make_request(name, prompt(6), 40)
    output, _ = solo(probe, 0, 120)
    stop_id = output[after - 1]
    assert stop_id not in output[: after - 1]
    return make_request(name, prompt(6), 40, stop_ids=frozenset({stop_id})), output[:after]


@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_past_a_stop_are_dropped(depth):
    bench = Bench(max_steps_in_flight=depth)
    request, expected = stopping_request("a", after=5)
    bench.add(request)
    other = bench.add(make_request("b", prompt(5, 2), 25))
    outputs = []
    while request.num_live:
        outputs += [output for output in bench.turn() if output.request is request]
    assert [token for output in outputs for token in output.token_ids] == expected
    assert outputs[-1].finish is FinishReason.STOP
    assert outputs[-1].matched_token_id == expected[-1]
    assert all(output.finish is None for output in outputs[:-1])
    bench.run()
    # The worker went on for as many steps as were in flight, and that did not count.
    sampled = sum(any(s.request is request for s in plan.samples) for plan in bench.plans)
    assert sampled == 5 + depth - 1
    end = next(end for plan in bench.plans for end in plan.finished if end.reason is FinishReason.STOP)
    assert end.num_tokens == 6 + 5
    bench.check_outputs([other])


def test_stop_id_is_no_stop_before_min_tokens():
    probe, expected = stopping_request("a", after=5)
    bench = Bench()
    # A worker that does not mask: its own min_tokens is 0, the scheduler's is not.
    request = make_request("a", prompt(6), 12, stop_ids=probe.stop_ids)
    request.min_tokens = 5
    bench.add(request)
    bench.run()
    assert bench.outputs[request, 0][:5] == expected
    assert len(bench.outputs[request, 0]) > 5


def test_stop_id_as_the_last_token_is_a_stop():
    request, expected = stopping_request("a", after=5)
    request.max_tokens = 5
    bench = Bench()
    bench.add(request)
    bench.run()
    assert bench.outputs[request, 0] == expected
    assert bench.reasons[request, 0] is FinishReason.STOP


# --- aborts


@pytest.mark.parametrize("depth", DEPTHS)
def test_everything_is_free_at_once_when_all_are_aborted(depth):
    bench = Bench(max_steps_in_flight=depth)  # C1
    for number in range(12):
        bench.add(make_request(f"r{number}", prompt(9, number), 30))
    for _ in range(6):
        bench.turn()
    for number in range(12):
        assert bench.scheduler.finish(RequestId(f"r{number}"), FinishReason.ABORT)
    assert is_free(bench)
    following = bench.add(make_request("next", prompt(9), 5))
    bench.run()
    bench.check_outputs([following])
    bench.check_empty()


@pytest.mark.parametrize("depth", DEPTHS)
def test_all_samples_are_freed_when_a_request_is_aborted_after_its_first_token(depth):
    bench = Bench(max_steps_in_flight=depth)  # C2
    request = bench.add(make_request("a", prompt(10), 30, n=4))
    while not bench.turn():
        pass
    assert bench.scheduler.finish(request.request_id, FinishReason.ABORT)
    assert is_free(bench)
    bench.run()
    bench.check_empty()


def test_id_of_an_aborted_queued_request_can_be_used_again():
    bench = Bench(max_num_seqs=1)  # C3
    running = bench.add(make_request("running", prompt(9), 10))
    bench.turn()
    bench.add(make_request("a", prompt(9), 10))
    assert bench.scheduler.finish(RequestId("a"), FinishReason.ABORT)
    again = make_request("a", prompt(12, 3), 10)
    assert bench.scheduler.refusal(again) is None
    bench.add(again)
    bench.run()
    bench.check_outputs([running, again])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("turns", range(8))
def test_id_used_again_in_the_same_step_gives_the_second_its_own_output(depth, turns):
    bench = Bench(max_steps_in_flight=depth, max_num_batched_tokens=12)  # C4
    mate = bench.add(make_request("mate", prompt(9, 5), 25))
    bench.add(make_request("a", prompt(21), 25))
    for _ in range(turns):
        bench.turn()
    bench.send()
    assert bench.scheduler.finish(RequestId("a"), FinishReason.ABORT)
    second = bench.add(make_request("a", prompt(17, 3), 9))
    bench.run()
    bench.check_outputs([mate, second])
    bench.check_empty()


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_frees_everything_at_whatever_moment_it_comes(depth):
    # Small enough a pool that the moments include a preempted row; long enough that they include all others.
    states = set()
    for moment in range(400):
        bench = Bench(
            max_steps_in_flight=depth, num_blocks=13, max_model_len=45, max_num_batched_tokens=12, max_num_seqs=3
        )
        mates = [bench.add(make_request(f"m{n}", prompt(8, n), 22)) for n in range(2)]
        victim = bench.add(make_request("victim", prompt(17, 9), 20))
        planned = True
        for _ in range(moment):
            if planned:
                planned = bench.send() is not None
            else:
                bench.complete()
                planned = True
        if not victim.num_live:
            break
        states.add(victim.samples[0].state)
        assert bench.scheduler.finish(victim.request_id, FinishReason.ABORT)
        bench.scheduler.check_integrity()
        bench.run()
        bench.check_outputs(mates)
        bench.check_empty()
    expected = {SampleState.WAITING, SampleState.PREFILL, SampleState.DECODE, SampleState.PREEMPTED}
    assert states >= expected | ({SampleState.LEFT} if depth > 1 else set())


def test_abort_of_an_unknown_or_finished_request_or_twice_does_nothing():
    bench = Bench()  # C7
    bench.add(make_request("a", prompt(5), 3))
    assert not bench.scheduler.finish(RequestId("nobody"), FinishReason.ABORT)
    assert bench.scheduler.finish(RequestId("a"), FinishReason.ABORT)
    assert not bench.scheduler.finish(RequestId("a"), FinishReason.ABORT)
    done = bench.add(make_request("b", prompt(5), 3))
    bench.run()
    assert done.finished
    assert not bench.scheduler.finish(RequestId("b"), FinishReason.ABORT)


def test_one_sample_can_be_ended_and_the_others_go_on():
    bench = Bench()
    request = bench.add(make_request("a", prompt(9), 12, n=3))
    for _ in range(4):
        bench.turn()
    assert bench.scheduler.finish(request.request_id, FinishReason.STOP, sample_index=1)
    assert not bench.scheduler.finish(request.request_id, FinishReason.STOP, sample_index=1)
    assert request.num_live == 2
    bench.run()
    for index in (0, 2):
        assert bench.outputs[request, index] == solo(request, index, bench.longest)[0]
    assert (request, 1) not in bench.reasons


# --- what nobody would hear of otherwise


def test_flush_says_what_ended_when_nothing_runs():
    bench = Bench(max_steps_in_flight=1)
    bench.add(make_request("a", prompt(5), 1))
    bench.turn()
    assert not bench.scheduler.has_work()
    assert bench.scheduler.has_unflushed()
    assert bench.send() is None
    plan = bench.flush()
    assert plan is not None
    assert plan.mode is PlanMode.APPLY_ONLY
    assert [end.num_tokens for end in plan.finished] == [6]
    assert not bench.scheduler.has_unflushed()
    assert bench.flush() is None
    bench.complete()
    bench.check_empty()


def test_apply_only_step_is_outstanding_until_it_is_acknowledged():
    bench = Bench(max_steps_in_flight=1)
    bench.add(make_request("a", prompt(5), 1))
    bench.turn()
    plan = bench.flush()
    bench.add(make_request("b", prompt(5), 1))
    assert bench.send() is None
    bench.scheduler.acknowledge(Step(plan.step - 1))
    assert bench.send() is None
    bench.scheduler.acknowledge(plan.step)
    assert bench.send() is not None


def test_results_that_do_not_fit_are_refused_and_change_nothing():
    bench = Bench(max_steps_in_flight=2)
    scheduler = bench.scheduler
    bench.add(make_request("a", prompt(5), 9))
    bench.add(make_request("b", prompt(5), 9))
    with pytest.raises(ResultMismatch, match="due is none"):
        scheduler.apply(StepTokens(Step(1), [3]))
    bench.send()
    bench.send()
    with pytest.raises(ResultMismatch, match="result of step 2, due is 1"):
        scheduler.apply(StepTokens(Step(2), [3, 3]))
    with pytest.raises(ResultMismatch, match="step 1: 1 tokens for 2 rows"):
        scheduler.apply(StepTokens(Step(1), [3]))
    assert scheduler.num_outstanding == 2
    assert all(len(s.token_ids) == 5 for request in scheduler.requests() for s in request.samples)
    bench.run()
    bench.check_empty()


def test_steps_are_counted_from_where_the_group_is():
    from control_plane.scheduling.scheduler import Scheduler, SchedulerLimits

    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=20, block_size=4, num_blocks=9)
    scheduler = Scheduler(limits, first_step=41)
    scheduler.add(make_request("a", prompt(4), 3))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.step == 41
    assert scheduler.step == 42
    assert len(scheduler.apply(StepTokens(Step(41), [7]))) == 1
