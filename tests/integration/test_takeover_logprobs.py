"""Log-probabilities under a change of owner: the next one tells all of them, of whatever token and prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from control_plane.generation import Cursor
from control_plane.live_request import resumed_stream
from service_chassis.ids import RequestId
from support.engine_harness import Collected, collect, generation
from support.logprobs import check, of_output, of_prompt
from support.owners import Owner
from support.remote_ranks import remote_ranks
from support.scripted_reference import seeded
from support.waiting import until

SLOW = "scripted:" + json.dumps({"step_time_s": 0.02, "sampler": "numpy"})
PROMPTS = {
    "running": [5, 7, 11, 250],
    "several": [9, 8, 7, 6, 5, 4],
    "ended": [1, 2, 3],
    "prefill": [(31 * place) % 256 for place in range(400)],  # of which a step computes 16
}
OPTIONS: dict[str, dict[str, Any]] = {
    "running": {"max_tokens": 80},
    "several": {"max_tokens": 60, "n": 3, "temperature": 1.0, "seed": 5},
    "ended": {"max_tokens": 4},
    "prefill": {"max_tokens": 5},
}


async def read(stream: Any, into: Collected) -> None:
    async for event in stream:
        into.take(event)


async def test_next_owner_tells_what_was_and_what_will_be_told(tmp_path: Path) -> None:
    with remote_ranks(2, directory=tmp_path) as ranks:
        async with asyncio.timeout(60):
            await take_over(ranks.addresses)


async def take_over(addresses: Sequence[str]) -> None:
    settings: dict[str, Any] = {"model": SLOW, "max_num_batched_tokens": 16}
    first = await Owner(addresses, **settings).start()
    before = {name: Collected() for name in PROMPTS}
    readings = []
    for name, prompt in PROMPTS.items():
        wanted = generation(name, prompt, num_logprobs=2, num_prompt_logprobs=1, **OPTIONS[name])
        stream = await first.engine.generate(wanted)
        readings.append(asyncio.create_task(read(stream, before[name])))
    await until(lambda: before["ended"].done is not None, "the short one's end")
    await until(lambda: len(before["several"].token_ids) == 3, "tokens of every sample")
    await until(lambda: before["prefill"].started is not None, "the long prompt's start")
    told = len(before["running"].token_ids[0])
    await first.die()
    for reading in readings:
        reading.cancel()
    await asyncio.gather(*readings, return_exceptions=True)
    assert not before["prefill"].token_ids
    assert 0 < told < 80

    second = await Owner(addresses, **settings).start()
    for name, prompt in PROMPTS.items():
        started = before[name].started
        assert started is not None
        token = bytes.fromhex(started.resume_token)
        # From the first token on, also where the client has some.
        live = second.engine._live.get(RequestId(name)) or second.engine._ids.record(
            RequestId(name), second.engine.now()
        )
        assert live is not None
        assert live.right.token == token
        cursors = [Cursor(index=0, num_tokens=1)] if name == "ended" else []
        after = await collect(resumed_stream(live, token, "", cursors))
        (columns,) = after.prompt_logprobs
        check(columns, of_prompt(prompt, 1))
        options = OPTIONS[name]
        for index, output in after.token_ids.items():
            skipped = before[name].token_ids[0][:1] if name == "ended" else []
            if options.get("temperature"):
                assert output == seeded(prompt, options["max_tokens"], 5, index, 1.0)
            assert len(skipped + output) == options["max_tokens"]
            check(after.logprobs[index], of_output(prompt, skipped + output, 2)[len(skipped) :])
        assert set(after.token_ids) == set(range(options.get("n", 1)))
    await second.leave()
