"""What does a new owner do between the snapshot of a batch and its first own step?

The rows of a full batch are told by a worker, read, checked against the digests, turned back into requests (text and
stop rules are replayed from the first output token), and seated in the scheduler. All of it comes before the group is
ready, so it is part of the takeover's 300 ms. There is no network here, and no model: rows hold real text in the
tokens of a real tokenizer.

Examples:
  python bench/adoption.py                                     # 256 rows of 128 prompt and 1920 output tokens
  python bench/adoption.py --rows 64 --output-len 500 --stop "###"
  python bench/adoption.py --model scripted --no-text

Times are milliseconds, the best of --runs; the last line is one JSON object with the same figures.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from arguments import at_least_one
from control_plane.adopted_batch import requests_of
from control_plane.control_blob import draw_resume_right, write_blob
from control_plane.deltas import DeltaEncoder, row_payload
from control_plane.generation import Generation, SamplingChoice, TextChoice
from control_plane.group.batch_snapshot import BatchSnapshot, read_snapshot
from control_plane.model_store import resolve_model
from control_plane.scheduling.scheduler import Scheduler, SchedulerLimits
from control_plane.text.model_text import load_model_text
from control_plane.text.tokenizer import Tokenizer
from maniple.v1 import worker_pb2
from maniple.v1.scheduler_delta_pb2 import NewRequest
from service_chassis.ids import RequestId
from service_chassis.protocol.arrays import token_terms_sum
from service_chassis.protocol.digest import MASK64, StateDigest
from worker_service.batch_rows import RowState
from worker_service.completed_batch import FrozenBatch, FrozenRow
from worker_service.snapshot import snapshot_parts

BLOCK_SIZE = 16
# Words of several lengths, punctuation, and characters that take more than one token.
TEXT = "Once upon a time, in 1871, a maniple of 120 men crossed the river; naïve, they said: “½ 東京 \U0001f600!”\n"
PHASES = ("tell", "read", "check", "requests", "seat")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/adoption.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="whose tokenizer, default demo")
    parser.add_argument("--rows", type=int, default=256, help="default 256")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt, default 128")
    parser.add_argument("--output-len", type=int, default=1920, help="known tokens of the output, default 1920")
    parser.add_argument("--stop", action="append", default=[], help="a stop string of every request; never met")
    parser.add_argument("--no-text", action="store_true", help="requests that want ids alone")
    parser.add_argument(
        "--cpu", action="store_true", help="count time on the CPU alone: on a machine that is not quiet"
    )
    parser.add_argument("--runs", type=at_least_one, default=5, help="default 5")
    return parser.parse_args(argv)


def make_batch(arguments: argparse.Namespace, tokenizer: Tokenizer) -> FrozenBatch:
    """Return what a worker would tell."""
    length = arguments.input_len + arguments.output_len
    digest, tokens_digest, rows = StateDigest(), 0, []
    once = tokenizer.encode(TEXT, add_special_tokens=False)
    many = np.resize(np.array(once, np.int32), length + arguments.rows)
    blocks = -(-length // BLOCK_SIZE)
    for index in range(arguments.rows):
        ids = many[index : index + length]
        generation = Generation(
            request_id=RequestId(f"row-{index}"),
            prompt_token_ids=tuple(ids[: arguments.input_len].tolist()),
            sampling=SamplingChoice(max_tokens=2 * length, seed=index, eos_ids=frozenset({tokenizer.vocab_size - 1})),
            text=TextChoice(stop=tuple(arguments.stop), skip_text=arguments.no_text),
        )
        sampling = row_payload(generation.sampling).sampling
        row_key = secrets.randbits(64)
        table = tuple(range(1 + index * blocks, 1 + (index + 1) * blocks))
        request = NewRequest(
            req_index=index,
            row_key=row_key,
            request_id=generation.request_id,
            n=1,
            num_prompt_tokens=arguments.input_len,
            sampling=sampling,
            control_blob=write_blob(generation, sampling, arrival_number=index + 1, right=draw_resume_right("")),
        )
        rows.append(
            FrozenRow(
                req_index=index,
                request=request,
                state=RowState.DECODE,
                token_ids=ids,
                is_void=False,
                num_computed_tokens=length - 1,
                num_prefill_tokens=arguments.input_len,
                tables=(table,),
                state_slots=(),
                age_s=1.0,
            )
        )
        digest.add(index, row_key)
        digest.compute(index, length - 1)
        digest.put_blocks(index, 0, 0, table)
        tokens_digest += token_terms_sum(row_key, 0, ids)
    return FrozenBatch(
        step=1000,
        state_digest=digest.value,
        token_digest=tokens_digest & MASK64,
        rows=tuple(rows),
        block_hashes=((),),
    )


async def read(raw: list[bytes]) -> BatchSnapshot:
    async def parts() -> AsyncIterator[Message]:
        for one in raw:
            yield worker_pb2.SnapshotResponse.FromString(one)

    return await read_snapshot(parts())


def adopt(batch: FrozenBatch, tokenizer: Tokenizer, clock: Callable[[], float]) -> dict[str, float]:
    """Do it all once; return seconds by phase."""
    at = [clock()]
    raw = [part.SerializeToString() for part in snapshot_parts(batch, None, ())]
    at.append(clock())
    snapshot = asyncio.run(read(raw))
    at.append(clock())
    encoder = DeltaEncoder()
    encoder.adopt(snapshot)
    at.append(clock())
    blocks = len(batch.rows) * len(batch.rows[0].tables[0]) * 2
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=len(batch.rows),
            max_num_batched_tokens=2048,
            max_model_len=4 * len(batch.rows[0].token_ids),
            block_size=BLOCK_SIZE,
            num_blocks=blocks + 1,
        ),
        first_step=snapshot.step + 1,
    )
    found = requests_of(snapshot, limit_of=scheduler.limit_of, tokenizer=tokenizer, now=0.0)
    at.append(clock())
    scheduler.adopt([one.adopted for one in found.continued], snapshot.cached)
    at.append(clock())
    assert len(found.continued) == scheduler.num_running == len(batch.rows)
    return dict(zip(PHASES, (after - before for before, after in itertools.pairwise(at)), strict=True))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse_arguments(argv)
    path = resolve_model(arguments.model, lambda what, share, detail: None).path
    tokenizer = load_model_text(path).tokenizer
    batch = make_batch(arguments, tokenizer)
    gc.collect()
    gc.freeze()
    clock = time.process_time if arguments.cpu else time.perf_counter
    runs = [adopt(batch, tokenizer, clock) for _ in range(arguments.runs)]
    best = {phase: min(run[phase] for run in runs) * 1000 for phase in PHASES}
    best["all"] = min(sum(run.values()) for run in runs) * 1000
    table = Table(title=f"{arguments.rows} rows, {arguments.input_len} + {arguments.output_len} tokens, milliseconds")
    for name in best:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.1f}" for value in best.values()))
    Console().print(table)
    figures = {"rows": arguments.rows, "input_len": arguments.input_len, "output_len": arguments.output_len}
    return {**figures, "milliseconds": {name: round(value, 2) for name, value in best.items()}}


if __name__ == "__main__":
    print(json.dumps(main()))
