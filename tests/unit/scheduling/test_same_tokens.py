"""Rule (a): tokens depend on the request alone. Whatever runs beside it, at any depth, preempted or not."""

import random

import pytest

from control_plane.scheduling.request import FinishReason, Request
from support.slot_hash_worker import VOCAB, Bench, make_request


def workload(seed: int, count: int) -> list[Request]:
    """Requests of mixed length; a third share heads with others, some have several samples, stop ids, priorities."""
    rng = random.Random(seed)
    requests: list[Request] = []
    for number in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        if requests and rng.random() < 0.35:
            other = rng.choice(requests[-30:]).prompt_token_ids
            prompt = [*other[: rng.randrange(1, len(other) + 1)], *prompt[: rng.randrange(8)]]
        requests.append(
            make_request(
                f"r{number}",
                prompt,
                rng.randrange(1, 28),
                min_tokens=rng.choice([0, 0, 3]),
                stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice([0, 2, 5]))),
                n=rng.choice([1, 1, 1, 1, 2, 4]),
                pooling=rng.choice([None, None, None, None, "last", "mean"]),
                priority=rng.choice([0, 1, 1]),
                arrival=float(number),
            )
        )
    return requests


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [400, 36], ids=["roomy", "preempting"])
def test_a_thousand_requests_get_the_tokens_of_their_solo_runs(depth, num_blocks):
    bench = Bench(
        check=False, num_blocks=num_blocks, max_steps_in_flight=depth, max_num_seqs=13, max_num_batched_tokens=61
    )
    requests = workload(seed=11, count=1000)
    arriving = iter(requests)
    for request in arriving:
        bench.add(request)
        if request.order[1] % 7 == 0:  # they come while others run
            bench.turn()
    bench.run()
    bench.check_outputs(requests)
    bench.check_empty()
    assert bench.scheduler.prefix_hits > 500
    assert any(plan.block_copies for plan in bench.plans)
    if num_blocks == 36:
        assert bench.scheduler.num_preemptions >= 10  # E1
    else:
        assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_preempted_and_checked_at_every_step(depth):
    bench = Bench(num_blocks=25, max_model_len=60, max_steps_in_flight=depth)
    requests = [bench.add(request) for request in workload(seed=depth, count=80)]
    bench.run()
    bench.check_outputs(requests)
    bench.check_empty()
    assert bench.scheduler.num_preemptions >= 10


@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_random_operations_keep_the_books_and_the_tokens(seed):
    """C5: submits, aborts, pauses, deadlines; preemptions and finishes follow by themselves."""
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=27, max_model_len=50, max_steps_in_flight=[1, 2, 4][seed], max_num_seqs=6, max_num_batched_tokens=17
    )
    living: list[Request] = []
    untouched: list[Request] = []
    fresh = iter(workload(seed=100 + seed, count=4000))
    for operation in range(3400):
        living = [request for request in living if request.num_live]
        choice = rng.random()
        if choice < 0.22 and len(living) < 25:
            request = next(fresh)
            request.deadline = rng.choice([None, None, operation + 60.0])
            if bench.scheduler.refusal(request) is None:
                bench.add(request)
                living.append(request)
                untouched.append(request)
        elif choice < 0.30 and living:
            request = rng.choice(living)
            index = rng.choice([None, None, 0, rng.randrange(request.n)])
            bench.scheduler.finish(request.request_id, FinishReason.ABORT, sample_index=index)
            untouched = [other for other in untouched if other is not request]
        elif choice < 0.36 and living:
            bench.scheduler.set_paused(rng.choice(living).request_id, rng.random() < 0.4)
        elif choice < 0.37:
            bench.scheduler.forget_prefix_cache()
        elif choice < 0.40:
            for request_id in bench.scheduler.expired(operation):
                bench.scheduler.finish(request_id, FinishReason.DEADLINE)
                untouched = [other for other in untouched if other.request_id != request_id]
        elif choice < 0.70:
            bench.send(operation)
        elif choice < 0.72:
            bench.flush()
        elif bench.num_in_flight:
            bench.complete()
        bench.scheduler.check_integrity()  # references = blocks in use
    for request in living:
        bench.scheduler.set_paused(request.request_id, False)
    bench.run()
    bench.check_outputs(untouched)
    bench.check_empty()
    assert bench.scheduler.num_preemptions >= 10
    assert len(untouched) > 50
