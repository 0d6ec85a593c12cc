"""What an engine measures, against what a client of it sees and what was sent to its workers."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.group.loss import LossReason
from control_plane.metrics.meters import Meters
from service_chassis.metrics import Reading, Spread
from support.engine_harness import collect, generation, running_engine, scripted

PROMPT = [5, 250, 17]


def values_of(meters: Meters) -> dict[tuple[str, ...], float | Spread]:
    """By name and the labels behind model and group."""
    return {(name, *labels[2:]): value for name, labels, value in map(_reading, meters.board.readings())}


def _reading(reading: Reading) -> Reading:
    assert reading.labels[:2] == ("m", "0")
    return reading


def number(spread: float | Spread) -> int:
    assert isinstance(spread, Spread)
    return spread.cumulative[-1]


def total(spread: float | Spread) -> float:
    assert isinstance(spread, Spread)
    return spread.sum


async def test_requests_are_counted_with_their_tokens_and_times() -> None:
    meters = Meters("m")
    async with running_engine(meters=meters.group("0")) as engine:
        began = engine.now()
        got = await asyncio.gather(
            *[collect(await engine.generate(generation(f"r{i}", PROMPT, max_tokens=5 + i))) for i in range(4)]
        )
        took_s = engine.now() - began
        num_steps = engine.status().step
    values = values_of(meters)
    num_tokens = sum(len(one.token_ids[0]) for one in got)
    assert num_tokens == 5 + 6 + 7 + 8
    assert values["vllm:generation_tokens_total",] == num_tokens
    assert values["vllm:prompt_tokens_total",] == 4 * len(PROMPT)
    assert values["vllm:request_success_total", "length"] == 4
    assert values["vllm:request_success_total", "abort"] == 0
    for name, sum_of in (("prompt", 4 * len(PROMPT)), ("generation", num_tokens)):
        spread = values[f"vllm:request_{name}_tokens",]
        assert (number(spread), total(spread)) == (4, sum_of)
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert number(values[f"vllm:{name}_seconds",]) == 4
        assert 0 <= total(values[f"vllm:{name}_seconds",]) <= 4 * took_s
    # Between tokens, and at most as long as the requests were here.
    assert 0 < number(values["vllm:inter_token_latency_seconds",]) <= num_tokens - 4
    assert total(values["vllm:inter_token_latency_seconds",]) <= 4 * took_s
    runs, bookkeeping = values["maniple_steps_total", "run"], values["maniple_steps_total", "apply_only"]
    assert isinstance(runs, float | int)
    assert isinstance(bookkeeping, float | int)
    assert runs + bookkeeping == num_steps
    assert number(values["maniple_delta_bytes",]) == num_steps
    for phase in ("schedule", "send"):
        assert number(values["maniple_step_phase_seconds", phase]) == num_steps
    assert number(values["maniple_step_phase_seconds", "execute"]) == runs
    # Every prompt token but none twice, and every sampled token but the last of each request, which nobody computes.
    assert total(values["vllm:iteration_tokens_total",]) == 4 * len(PROMPT) + num_tokens - 4


async def test_time_between_requests_is_no_latency_between_tokens() -> None:
    meters = Meters("m")
    async with running_engine(meters=meters.group("0")) as engine:
        decode_s = 0.0
        for index in range(3):
            done = (await collect(await engine.generate(generation(f"r{index}", PROMPT, max_tokens=9)))).done
            assert done is not None
            decode_s += done.duration_s - done.time_to_first_token_s
            await asyncio.sleep(0.2)
    values = values_of(meters)
    assert total(values["vllm:inter_token_latency_seconds",]) <= decode_s + 0.01
    assert total(values["vllm:request_decode_time_seconds",]) == pytest.approx(decode_s, abs=0.01)


async def test_steady_step_asks_nothing_of_rows() -> None:
    """With 32 rows a step is measured by as many observations as with one."""
    observed = []
    for num_rows in (1, 32):
        meters = Meters("m")
        async with running_engine(max_num_seqs=32, meters=meters.group("0")) as engine:
            await asyncio.gather(
                *[collect(await engine.generate(generation(f"r{i}", PROMPT, max_tokens=40))) for i in range(num_rows)]
            )
        values = values_of(meters)
        observed.append(number(values["maniple_step_phase_seconds", "publish"]))
        assert observed[-1] <= number(values["maniple_step_phase_seconds", "schedule"])
    assert observed[1] <= observed[0] + 32  # requests begin one after another


async def test_lost_group_and_the_requests_that_ended_with_it_are_counted_by_cause() -> None:
    meters = Meters("m")
    async with running_engine(scripted(step_time_s=0.05), meters=meters.group("0")) as engine:
        stream = await engine.generate(generation("r", PROMPT, max_tokens=1000))
        await anext(aiter(stream))
        engine.fail(LossReason(None, "the group was stuck in a collective in step 7 for 10.1 s"))
        engine.fail(LossReason(None, "rank 1 exited: killed by SIGKILL"))  # it is lost once
        with pytest.raises(Exception, match="stuck"):
            await collect(stream)
        values = values_of(meters)
    assert values["maniple_group_losses_total", "stuck"] == 1
    assert values["maniple_group_losses_total", "exited"] == 0
    assert values["maniple_requests_failed_total", "GROUP_LOST"] == 1
    assert number(values["vllm:e2e_request_latency_seconds",]) == 0
