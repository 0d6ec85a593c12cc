"""Who tries tokens ahead, how many, and what of it costs nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest

from control_plane.scheduling.request import FinishReason
from control_plane.scheduling.speculation import LONGEST_REST, PATIENCE
from support.slot_hash_worker import Bench, choose, make_request

PROMPT = (3, 1, 4, 1, 5)


class Guesser:
    """Has the worker of a bench try tokens that are all right, or all wrong."""

    def __init__(self, bench, *, is_right):
        self.is_right, worker = is_right, bench.worker

        def try_ahead(req_index, start, count):
            row, tried = worker._rows[req_index], []
            for _ in range(count - 1):
                h = worker._write(row, start, [row.tokens[-1], *tried])
                right = choose(h, row.new.sampling.seed, row.new.sample_index, worker._banned(row, len(tried)))
                tried.append(right if self.is_right else (right + 1) % 97)
            sampled = []
            for place in range(count):
                h = worker._write(row, start, [row.tokens[-1 - place], *tried[:place]])
                sampled.append(worker._sample(row, h))
                if sampled != tried[: place + 1]:
                    break
            worker._write(row, start, [row.tokens[-1 - len(sampled)], *tried])
            return sampled

        worker._try_ahead = try_ahead


def speculating(**limits):
    return Bench(**{"max_steps_in_flight": 1, "num_speculative_tokens": 3, **limits})


def tries(bench):
    """Tokens that rows might try ahead in each step so far."""
    return [sum(plan.tries.values()) for plan in bench.plans]


def test_right_tokens_save_steps_and_the_last_one_is_never_overrun():
    bench = speculating()
    Guesser(bench, is_right=True)
    request = bench.add(make_request("a", PROMPT, 14))
    bench.run()
    bench.check_outputs([request])
    # The first comes with the prompt; of the 13 others four a step, and at the end no more than there are.
    assert tries(bench) == [0, 3, 3, 3, 0, 0]
    assert bench.scheduler.num_accepted_tokens == 9


def test_row_that_tries_in_vain_rests_ever_longer():
    bench = speculating(max_model_len=200)
    Guesser(bench, is_right=False)
    request = bench.add(make_request("a", PROMPT, 90))
    bench.run()
    bench.check_outputs([request])
    tried = [place for place, count in enumerate(tries(bench)) if count]
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps[: PATIENCE - 1] == [1] * (PATIENCE - 1)
    rests = gaps[PATIENCE - 1 :]
    assert rests[:4] == [3, 5, 9, 17]  # 2, 4, 8 and 16 steps between
    assert set(rests[4:]) <= {LONGEST_REST + 1}
    resting = [plan for plan in bench.plans if not plan.tries and not plan.new_rows]
    # It is not even mentioned then, but for blocks and for the one correction after a try.
    assert sum(bool(change.settles) for plan in resting for change in plan.changes) <= len(tried)
    assert not bench.scheduler._speculation._visited


def test_right_tokens_end_a_row_of_rests():
    bench = speculating(max_model_len=200)
    guesser = Guesser(bench, is_right=False)
    bench.add(make_request("a", PROMPT, 120))
    for _ in range(30):
        bench.turn()
    guesser.is_right = True
    before = len(bench.plans)
    bench.run()
    tried = tries(bench)[before:]
    first = next(place for place, count in enumerate(tried) if count)
    assert first <= LONGEST_REST
    assert all(tried[first : first + 10])


def test_trying_takes_what_prefill_leaves_of_the_budget():
    bench = speculating(max_num_batched_tokens=10, max_num_seqs=4)
    Guesser(bench, is_right=True)
    bench.add(make_request("a", PROMPT, 60))
    bench.turn()
    bench.add(make_request("b", tuple(range(30)), 4))
    bench.turn()
    assert (bench.plans[-1].num_tokens, tries(bench)[-1]) == (10, 0)  # one decodes, nine of the prompt
    bench.run()
    assert all(plan.num_tokens <= 10 for plan in bench.plans)
    assert bench.scheduler.num_accepted_tokens > 20


def test_trying_preempts_nobody_and_leaves_a_block_for_everybody():
    limits = {"num_blocks": 12, "block_size": 4, "max_model_len": 40}
    preemptions = []
    for num_tokens in (0, 3):
        bench = speculating(**limits, num_speculative_tokens=num_tokens)
        Guesser(bench, is_right=False)
        requests = [bench.add(make_request(f"r{number}", PROMPT, 8)) for number in range(3)]
        bench.run()
        bench.check_outputs(requests)
        preemptions.append(bench.scheduler.num_preemptions)
    assert preemptions == [0, 0]


def test_row_under_a_mask_tries_nothing():
    bench = speculating()
    bench.add(make_request("a", PROMPT, 10, masked=True))
    bench.send()
    assert not bench.scheduler._speculation


@pytest.mark.parametrize("when", ["in flight", "answered"])
@pytest.mark.parametrize("is_right", [True, False])
def test_request_ends_while_it_is_not_known_or_not_said_what_was_accepted(when, is_right):
    bench = speculating()
    Guesser(bench, is_right=is_right)
    request = bench.add(make_request("a", PROMPT, 40))
    other = bench.add(make_request("b", (2, 7), 20))
    for _ in range(3):
        bench.turn()
    bench.send()
    if when == "answered":
        bench.complete()
    bench.scheduler.finish(request.request_id, FinishReason.ABORT)
    bench.run()
    bench.check_outputs([other])
    bench.check_empty()
