"""A control plane dies at any moment of random traffic; the next one goes on from what the worker says.

Rule (a): every request that was in a delta gets the tokens of its solo run, none missing, repeated or past its end.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.scheduling.adoption import first_end
from control_plane.scheduling.request import FinishReason
from support.delta_traffic import LIMITS, OPERATIONS
from support.slot_hash_worker import VOCAB, make_request, solo, solo_vector
from support.takeover_bench import WatchedBench


def step_through(bench, operations, requests, touched):
    """Do some operations and stop in the middle of things."""
    for what, argument in operations:
        if what == "add":
            fields = dict(argument)
            request = make_request(f"r{len(requests)}", fields.pop("prompt"), fields.pop("max_tokens"), **fields)
            request.arrival = float(len(requests))
            if bench.scheduler.refusal(request) is None:
                requests.append(bench.add(request))
        elif what == "send":
            bench.send()
        elif what == "complete" and bench.num_in_flight:
            bench.complete()
        elif what == "turn":
            for _ in range(argument):
                bench.turn()
        elif what == "flush":
            bench.flush()
        elif what == "abort" and requests:
            request = requests[argument[0] % len(requests)]

            bench.scheduler.finish(request.request_id, FinishReason.ABORT, sample_index=argument[1])
            touched.add(request.request_id)
        elif what == "forget":
            bench.scheduler.forget_prefix_cache()


def check(bench, touched, started):
    """Everything that the ranks knew got its solo output; nothing is held."""
    for request, vector in bench.vectors.items():
        assert vector == solo_vector(request), f"{request}"
    for (request, index), output in bench.outputs.items():
        if request.request_id in touched or request.request_id not in started or request.pools:
            continue
        expected, reason = solo(request, index, bench.longest)
        assert output == expected, f"{request} sample {index}"
        assert bench.reasons[request, index] is reason, f"{request} sample {index}"
    bench.check_empty()


def in_a_delta(bench):
    """Ids of all requests that the worker knows or knew."""
    snapshot = bench.snapshot()
    return {row.request_id for row in snapshot.rows} | {stone.request_id for stone in snapshot.buried}


@settings(max_examples=120, deadline=None)
@given(lives=st.lists(st.lists(OPERATIONS, max_size=25), min_size=1, max_size=3), limits=LIMITS)
def test_adopted_batch_gives_every_request_its_solo_tokens(lives, limits):
    bench, requests, touched = WatchedBench(**limits), [], set()
    for operations in lives:
        step_through(bench, operations, requests, touched)
        bench = bench.taken_over()
    started = in_a_delta(bench)
    bench.run()
    check(bench, touched, started)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [200, 30], ids=["roomy", "preempting"])
def test_control_plane_that_dies_every_few_steps_loses_and_repeats_nothing(depth, num_blocks):
    rng = random.Random(depth * num_blocks)
    bench = WatchedBench(num_blocks=num_blocks, max_steps_in_flight=depth, max_model_len=80)
    for number in range(30):
        bench.add(
            make_request(
                f"r{number}",
                [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))],
                rng.randrange(1, 28),
                stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice([0, 4]))),
                n=rng.choice([1, 1, 3]),
                arrival=float(number),
            )
        )
    while bench.scheduler.has_work():
        waiting = [r for r in bench.scheduler.requests() if not r.started]
        for _ in range(rng.randrange(1, 6)):
            bench.send()
        if bench.num_in_flight and rng.random() < 0.5:
            bench.complete()
        started = in_a_delta(bench)
        bench = bench.taken_over()
        lost = {r.request_id for r in waiting} - in_a_delta(bench)
        for request in waiting:  # its client sends it again, since it provably did not start
            if request.request_id in lost:
                again = make_request(
                    request.request_id,
                    request.prompt_token_ids,
                    request.max_tokens,
                    stop_ids=request.stop_ids,
                    n=request.n,
                    arrival=request.arrival,
                )
                bench.outputs = {k: v for k, v in bench.outputs.items() if k[0].request_id != request.request_id}
                bench.add(again)
        assert started <= in_a_delta(bench)
    bench.run()
    check(bench, set(), in_a_delta(bench))
    assert len({request.request_id for request, _ in bench.outputs}) == 30


def test_prefix_of_a_request_that_left_is_hit_after_a_takeover():
    bench = WatchedBench(block_size=4)
    prompt = list(range(21))
    bench.add(make_request("first", prompt, 3))
    bench.run()
    bench = bench.taken_over()
    again = bench.add(make_request("second", prompt, 3))
    bench.run()
    assert again.num_cached_tokens == 20
    expected, _ = solo(again, 0, bench.longest)
    assert bench.outputs[again, 0] == expected


def test_prefix_of_a_row_that_still_runs_is_hit_after_a_takeover():
    bench = WatchedBench(block_size=4)
    prompt = list(range(21))
    bench.add(make_request("first", prompt, 20))
    for _ in range(4):
        bench.turn()
    bench = bench.taken_over()
    again = bench.add(make_request("second", prompt, 3))
    bench.run()
    assert again.num_cached_tokens == 20
    check(bench, set(), {"first", "second"})


def test_row_that_ran_past_its_end_leaves_with_the_tokens_that_count():
    stop_at = 5
    request = make_request("r", [3, 4, 5], 20)
    output, _ = solo(request, 0, 120)
    stop_id = next(output[at] for at in range(stop_at, 20) if output.index(output[at]) == at)
    request = make_request("r", [3, 4, 5], 20, stop_ids=frozenset({stop_id}))
    expected, reason = solo(request, 0, 120)
    bench = WatchedBench(max_steps_in_flight=4)
    bench.add(request)
    while len(bench.outputs[request, 0]) < len(expected) - 1:
        bench.turn()
    while bench.send() is not None:  # the step that stops it, and steps after it, are on their way when it dies
        pass
    known = bench.snapshot().rows[0]
    bench = bench.taken_over()
    assert len(bench.worker.known_tokens(known.req_index)) > 3 + len(expected), "nothing was sampled past the end"
    (adopted,) = (one for one, _ in bench.outputs)
    assert (bench.outputs[adopted, 0], bench.reasons[adopted, 0]) == (expected, reason)
    bench.flush()
    (end,) = bench.plans[-1].finished
    assert end.num_tokens == 3 + len(expected)
    bench.run()
    bench.check_empty()
    (stone,) = bench.snapshot().buried
    assert list(stone.token_ids[3:]) == expected


@pytest.mark.parametrize(
    ("output", "end"),
    [
        ([1, 2, 3], None),
        ([1, 9, 3], (FinishReason.STOP, 2, 9)),
        ([9, 1, 9, 9], (FinishReason.STOP, 3, 9)),  # the first is among min_tokens
        ([1, 2, 3, 4], (FinishReason.LENGTH, 4, None)),
        ([1, 2, 3, 9], (FinishReason.STOP, 4, 9)),  # as in a step: the stop id wins over the limit
        ([1, 2, 3, 4, 9], (FinishReason.LENGTH, 4, None)),
        ([], None),
    ],
)
def test_end_of_an_output_is_where_its_rules_first_say_so(output, end):
    request = make_request("r", [7, 7], 4, min_tokens=1, stop_ids=frozenset({9}))
    assert first_end(request, output, limit=6) == end
