"""What is told of named blocks: an index built from it holds what the pool holds, after any traffic."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from control_plane.scheduling.block_events import BlockContents, BlockRemoved, BlockStored, CacheCleared
from control_plane.scheduling.block_pool import BlockPool
from control_plane.scheduling.plan import StepTokens
from control_plane.scheduling.request import FinishReason, Request
from control_plane.scheduling.scheduler import Scheduler, SchedulerLimits
from service_chassis.ids import RequestId

LIMITS = SchedulerLimits(
    max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, block_size=4, num_blocks=30, max_steps_in_flight=2
)


def packed(ids):
    return b"".join(token_id.to_bytes(4, "little") for token_id in ids)


def chain(ids, namespace=b""):
    """The names of an output's full blocks, by the protocol's words: (name, parent, ids)."""
    parent = blake2b(b"maniple-kv-1" + namespace, digest_size=16).digest()
    named = []
    for start in range(0, len(ids) - 3, 4):
        name = blake2b(parent + packed(ids[start : start + 4]), digest_size=16).digest()
        named.append((name, parent if start else None, packed(ids[start : start + 4])))
        parent = name
    return named


class Follower:
    """An index of names, kept from events alone."""

    def __init__(self, scheduler):
        self.index = {}
        self.scheduler = scheduler
        scheduler.record_block_events(True)
        self.begin()

    def begin(self):
        self.scheduler.take_block_events()
        stored, unknown = self.scheduler.stored_blocks()
        assert unknown == 0
        self.index = {}
        for event in stored:
            self.index[event.name] = event.contents

    def catch_up(self):
        for event in self.scheduler.take_block_events():
            match event:
                case BlockStored(name, contents):
                    assert name not in self.index, "told twice"
                    self.index[name] = contents
                case BlockRemoved(name):
                    del self.index[name]
                case CacheCleared():
                    self.index.clear()


def run(scheduler, steps, token=7):
    """Run steps, each with the same token for every row."""
    for _ in range(steps):
        plan = scheduler.schedule(0.0)
        if plan is None:
            return
        scheduler.apply(StepTokens(plan.step, [token] * len(plan.rows)))


def request(name, prompt, max_tokens=8, **more):
    return Request(
        request_id=RequestId(name), prompt_token_ids=tuple(prompt), max_tokens=max_tokens, arrival=0.0, **more
    )


@pytest.mark.parametrize("namespace", [b"", bytes(range(16))], ids=["plain", "salted"])
def test_full_blocks_are_told_with_parent_tokens_and_namespace(namespace):
    scheduler = Scheduler(LIMITS)
    scheduler.record_block_events(True)
    scheduler.add(request("a", range(10), cache_namespace=namespace))
    run(scheduler, 20)
    told = scheduler.take_block_events()
    # The last token is sampled and never computed: it fills no block.
    expected = chain([*range(10), *[7] * 7], namespace)
    assert [(event.name, event.contents.parent, event.contents.token_ids) for event in told] == expected
    assert {event.contents.cache_namespace for event in told} == {namespace}
    assert scheduler.take_block_events() == []


def test_nothing_is_kept_while_nobody_follows():
    scheduler = Scheduler(LIMITS)
    scheduler.add(request("a", range(10)))
    run(scheduler, 20)
    assert scheduler.take_block_events() == []
    scheduler.record_block_events(True)
    scheduler.add(request("b", range(50, 60)))
    run(scheduler, 20)
    assert len(scheduler.take_block_events()) == 4
    scheduler.record_block_events(False)
    scheduler.add(request("c", range(80, 90)))
    run(scheduler, 20)
    assert scheduler.take_block_events() == []


def test_forgetting_tells_of_every_block_that_goes_and_of_none_that_is_held():
    scheduler = Scheduler(LIMITS)
    scheduler.add(request("gone", range(9)))
    run(scheduler, 20)
    scheduler.add(request("held", range(50, 59), max_tokens=40))
    run(scheduler, 3)  # the third token is sampled and not computed
    scheduler.record_block_events(True)
    scheduler.forget_prefix_cache()
    gone = {name for name, _, _ in chain([*range(9), *[7] * 7])}
    assert {event.name for event in scheduler.take_block_events()} == gone
    assert {event.name for event in scheduler.stored_blocks()[0]} == {
        name for name, _, _ in chain([*range(50, 59), *[7] * 2])
    }


def test_stored_blocks_name_parents_before_children_also_where_a_parent_came_back_later():
    pool = BlockPool(9)
    names = [bytes([number]) * 16 for number in range(4)]
    contents = [BlockContents(names[number - 1] if number else None, b"", b"") for number in range(4)]
    blocks = pool.allocate(4)
    for number in (1, 3, 2, 0):
        pool.register(blocks[number], names[number], 1, contents[number])
    assert [event.name for event in pool.stored()[0]] == names
    other = pool.allocate(1)[0]
    pool.register(other, b"x" * 16, 1)  # an owner before us knew what it holds
    assert pool.stored()[1] == 1


@pytest.mark.parametrize("seed", range(4))
def test_index_built_from_events_is_that_of_the_pool_after_any_traffic(seed):
    rng = random.Random(seed)
    scheduler = Scheduler(LIMITS)
    follower = Follower(scheduler)
    late = None
    number = 0
    shared = [rng.randrange(50) for _ in range(12)]
    for turn in range(600):
        if rng.random() < 0.3 and scheduler.num_waiting < 4:
            number += 1
            prompt = shared[: rng.choice([0, 4, 8, 12])] + [rng.randrange(50) for _ in range(rng.randint(1, 9))]
            wanted = request(f"r{number}", prompt, rng.randint(1, 30), n=rng.choice([1, 1, 3]))
            if scheduler.refusal(wanted) is None:
                scheduler.add(wanted)
        if rng.random() < 0.05:
            scheduler.finish(RequestId(f"r{rng.randint(1, number + 1)}"), FinishReason.ABORT)
        if rng.random() < 0.02:
            scheduler.forget_prefix_cache()
        plan = scheduler.schedule(0.0)
        if plan is not None:
            scheduler.apply(StepTokens(plan.step, [rng.randrange(50) for _ in plan.rows]))
        elif (plan := scheduler.flush()) is not None:
            scheduler.acknowledge(plan.step)
        if late is None and turn == 300:  # a second one begins with what is there, and both agree from then on
            follower.catch_up()
            late = dict(follower.index)
            follower.begin()
            assert follower.index == late
        follower.catch_up()
        stored, _ = scheduler.stored_blocks()
        assert {event.name: event.contents for event in stored} == follower.index
        seen: set[bytes] = set()
        for event in stored:
            assert event.contents.parent in seen or event.contents.parent not in follower.index
            seen.add(event.name)
    assert scheduler.num_preemptions, "the traffic was to be heavy"
