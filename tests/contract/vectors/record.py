"""Record ``recorded_deltas.log`` anew: ``PYTHONPATH=tests python tests/contract/vectors/record.py``.

A scripted run in a pool so small that rows are preempted: greedy and seeded requests, two samples of one prompt, a
prefix hit, stops. Prompts, seeds and lengths are ``REQUESTS``; the test recomputes the tokens from their definition.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from control_plane.assembly import build_engine, build_group
from control_plane.config import ControlPlaneConfig, resolve_auto
from control_plane.delta_recorder import DeltaRecorder
from control_plane.generation import Generation
from control_plane.text.model_text import load_model_text
from support.engine_harness import collect, generation
from support.waiting import until

PATH = Path(__file__).with_name("recorded_deltas.log")
HEAD = tuple(range(40, 53))
LIMITS = {"max_num_seqs": 5, "num_kv_blocks": 14, "block_size": 4, "max_num_batched_tokens": 11, "max_model_len": 40}


def requests() -> list[Generation]:
    """What is run: all at once, and then the last two one after the other."""
    return [
        generation("greedy", (*HEAD, 1), max_tokens=14),
        generation("seeded", (7, 7, 9), max_tokens=15, temperature=1.25, seed=2**63 + 5),
        generation("forked", (3, 1, 4, 1, 5, 9), max_tokens=13, temperature=0.75, seed=77, n=2),
        generation("long", tuple(range(100, 119)), max_tokens=12),
        generation("head", (*HEAD, 2), max_tokens=2),
        generation("again", (*HEAD, 3), max_tokens=4),
    ]


async def record(path: Path) -> None:
    """Run the requests on a group of the scripted model, recorded to ``path``."""
    asked = ControlPlaneConfig(model="scripted", executor="uni", device="cpu", **LIMITS)
    config = resolve_auto(asked, has_gpu=False, on_terminal=False)
    recorder = DeltaRecorder.at(str(path))
    group = build_group(config, config.model, "", recorder=recorder)
    engine = build_engine(config, group, await group.form(), load_model_text(config.model).tokenizer)
    loop = asyncio.create_task(engine.run())
    *first, head, again = requests()
    await asyncio.gather(*[collect(await engine.generate(one)) for one in first])
    for one in (head, again):
        await collect(await engine.generate(one))
    await until(lambda: not engine._scheduler.has_unflushed(), "the last row's end")
    loop.cancel()
    await group.teardown("recorded")
    recorder.close()


if __name__ == "__main__":
    PATH.unlink(missing_ok=True)
    asyncio.run(record(PATH))
    print(f"{PATH}: {PATH.stat().st_size} bytes", file=sys.stderr)
