"""The demo model through the whole path below the doors: chunked prefill, prefix hits, preemption, steps in flight."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from control_plane.generation import Generation
from support.demo_model import demo_directory
from support.engine_harness import Collected, collect, generation, running_engine
from support.greedy_rule import assert_greedy

# Small on purpose: prompts are longer than the token budget, and twelve rows want more blocks than there are.
SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 22,
    "max_num_waiting": 100,
}


def workload(count: int, *, longest: int, max_tokens: int, seeded: bool = False) -> list[Generation]:
    rng = random.Random(5)
    shared = [rng.randrange(1000, 40000) for _ in range(longest // 2)]
    requests = []
    for number in range(count):
        own = [rng.randrange(1000, 40000) for _ in range(rng.randint(1, longest // 2))]
        prompt = (shared if number % 3 == 0 else []) + own
        sampling: dict[str, Any] = {"max_tokens": max_tokens}
        if seeded and number % 4 == 0:
            sampling |= {"temperature": 1.0, "seed": number, "top_p": 0.95, "top_k": 50}
        requests.append(generation(f"r{number}", prompt, **sampling))
    return requests


async def run_all(requests: list[Generation], **config: Any) -> tuple[list[Collected], int, int]:
    """Serve all at once; return what came, the preemptions and the cached tokens."""
    async with running_engine(str(demo_directory()), **{**SMALL, **config}) as engine:
        streams = [await engine.generate(one) for one in requests]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        status = engine.status()
    return results, status.num_preemptions, status.prefix_cache_hits


@pytest.mark.timeout(240)
async def test_greedy_tokens_are_those_of_transformers_when_forty_eight_requests_share_a_small_pool() -> None:
    from transformers import AutoModelForCausalLM

    requests = workload(48, longest=100, max_tokens=20)
    results, num_preemptions, num_cached = await run_all(requests)
    assert num_preemptions >= 3
    assert num_cached > 0
    model = AutoModelForCausalLM.from_pretrained(demo_directory(), dtype="float32").eval()
    assert_greedy(
        model,
        [(one.prompt_token_ids, got.token_ids[0]) for one, got in zip(requests, results, strict=True)],
    )


@pytest.mark.timeout(240)
async def test_tokens_are_the_same_to_the_bit_at_any_depth_and_with_preemption_when_batch_invariant() -> None:
    requests = workload(16, longest=60, max_tokens=18, seeded=True)
    plain, num_preemptions, _ = await run_all(
        requests, batch_invariant=True, max_steps_in_flight=1, num_kv_blocks=400, enable_prefix_caching=False
    )
    assert num_preemptions == 0
    for max_steps_in_flight in (1, 2, 4):
        results, num_preemptions, num_cached = await run_all(
            requests, batch_invariant=True, max_steps_in_flight=max_steps_in_flight, num_kv_blocks=18
        )
        assert num_preemptions >= 1
        assert num_cached > 0
        for one, want, got in zip(requests, plain, results, strict=True):
            assert got.token_ids == want.token_ids, (max_steps_in_flight, one.request_id)
