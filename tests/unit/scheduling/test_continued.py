"""Requests of a lost group go on in another scheduler: the same tokens, none missing, none twice (rule (a))."""

from __future__ import annotations

import random

import pytest

from control_plane.scheduling.request import FinishReason, RefusalKind, Request, SampleState
from support.slot_hash_worker import VOCAB, Bench, make_request, solo

SIZES = {"max_model_len": 60, "max_num_seqs": 6, "max_num_batched_tokens": 23}


def workload(rng: random.Random, count: int) -> list[Request]:
    shared = [rng.randrange(VOCAB) for _ in range(17)]
    return [
        make_request(
            f"r{number}",
            [*shared[: rng.choice([0, 4, 9, 17])], *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12)))],
            rng.randrange(1, 30),
            min_tokens=rng.choice([0, 3]),
            stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice([0, 3]))),
            n=rng.choice([1, 1, 2, 4]),
            pooling=rng.choice([None, None, None, "last", "mean"]),
            priority=rng.choice([0, 1]),
            arrival=float(number),
        )
        for number in range(count)
    ]


def move(old: Bench, new: Bench) -> None:
    """Everything that lives in one goes on in the other, as far as it was told."""
    for request in old.scheduler.requests():
        continued = request.continued()
        assert new.scheduler.refusal(continued) is None
        new.scheduler.add(continued)
        for index in range(request.n):
            new.outputs[continued, index] = list(old.outputs[request, index])


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [200, 19], ids=["roomy", "preempting"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_get_their_solo_tokens_when_their_group_is_lost_again_and_again(
    depth: int, num_blocks: int, seed: int
) -> None:
    rng = random.Random(seed)
    requests = workload(rng, 40)
    told: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], FinishReason] = {}
    bench = Bench(num_blocks=num_blocks, max_steps_in_flight=depth, **SIZES)
    longest = bench.longest
    for request in requests:
        bench.add(request)
    num_moved = num_half_done = 0
    while bench.scheduler.has_work():
        for _ in range(rng.randrange(1, 25)):
            for output in bench.turn():
                key = output.request.request_id, output.sample_index
                assert key not in ends, "output after the end"
                told.setdefault(key, []).extend(output.token_ids)
                if output.finish is not None:
                    ends[key] = output.finish
        num_moved += len(bench.scheduler.requests())
        num_half_done += sum(
            any(s.state is SampleState.FINISHED for s in request.samples) for request in bench.scheduler.requests()
        )
        # What was in flight is lost with the group: its results never come.
        lost, bench = bench, Bench(num_blocks=num_blocks, max_steps_in_flight=depth, **SIZES)
        move(lost, bench)
    assert num_moved > 40
    assert num_half_done > 0
    for request in requests:
        for index in range(request.n):
            tokens, reason = solo(request, index, longest)
            assert told[request.request_id, index] == tokens, f"{request} sample {index}"
            assert ends[request.request_id, index] is reason


def test_continued_request_brings_prompt_and_output_and_tells_them_apart() -> None:
    old, new = Bench(), Bench()
    request = old.add(make_request("r", [5, 6, 7], 9, n=2))
    while old.scheduler.num_running < 2 or len(old.outputs[request, 1]) < 3:
        old.turn()
    known = [list(sample.token_ids) for sample in request.samples]
    old.scheduler.finish(request.request_id, FinishReason.ABORT, sample_index=0)
    continued = request.continued()
    assert continued.outputs == (None, tuple(known[1][3:]))
    assert continued.longest_known() == tuple(known[1])
    new.add(continued)
    plan = new.send()
    assert plan is not None
    (row,) = plan.new_rows
    assert (row.token_ids, row.num_prefill_tokens) == (tuple(known[1]), len(known[1]))
    assert row.sample.request.prompt_token_ids == (5, 6, 7)
    assert row.sample.index == 1
    new.run()
    new.check_empty()
    assert new.reasons == {(continued, 1): FinishReason.LENGTH}


def test_request_that_was_in_no_delta_begins_anew_and_keeps_its_place_in_the_queue() -> None:
    old, new = Bench(), Bench(max_num_waiting=1)
    early = old.add(make_request("early", [1], 4, arrival=1.0))
    new.add(make_request("late", [2], 4, arrival=2.0))
    continued = early.continued()
    assert continued.outputs == ()
    refusal = new.scheduler.refusal(continued)  # it may be sent again, so the bound holds for it
    assert refusal is not None
    assert refusal.kind is RefusalKind.QUEUE_FULL
    new = Bench()
    new.add(make_request("late", [2], 4, arrival=2.0))
    new.add(continued)
    plan = new.send()
    assert plan is not None
    assert [row.sample.request.request_id for row in plan.new_rows] == ["early", "late"]


def test_continued_request_is_not_turned_away_by_a_full_queue_but_by_what_it_needs() -> None:
    old = Bench()
    request = old.add(make_request("r", list(range(10)), 50))
    while len(old.outputs[request, 0]) < 20:
        old.turn()
    full = Bench(max_num_waiting=1)
    full.add(make_request("other", [2], 4))
    assert full.scheduler.refusal(request.continued()) is None
    small = Bench(num_blocks=7)
    refusal = small.scheduler.refusal(request.continued())
    assert refusal is not None
    assert refusal.kind is RefusalKind.NEEDS_MORE_BLOCKS


def test_cached_prefix_is_counted_in_whole_computed_blocks_of_its_namespace_and_changes_nothing() -> None:
    bench = Bench()  # blocks of 4 tokens
    prompt = list(range(11))
    bench.add(make_request("r", prompt, 3))
    count = bench.scheduler.cached_prefix_tokens
    assert bench.send() is not None
    assert count(prompt) == 0  # planned, not computed
    bench.run()
    before = bench.scheduler.num_free_blocks, bench.scheduler.num_cached_blocks
    assert count(prompt) == 8
    assert count(prompt[:9]) == 8
    assert count(prompt[:8]) == 4  # the last token is always computed
    assert count([*prompt[:4], 96, *prompt[5:]]) == 4
    assert count(prompt, b"other") == 0
    assert count([]) == count([0]) == 0
    assert (bench.scheduler.num_free_blocks, bench.scheduler.num_cached_blocks) == before
    assert Bench(enable_prefix_caching=False).scheduler.cached_prefix_tokens(prompt) == 0
    again = bench.add(make_request("again", prompt, 3))
    bench.run()
    assert again.num_cached_tokens == 8  # what was promised
    bench.scheduler.forget_prefix_cache()
    assert count(prompt) == 0
