"""What does one steady step cost vLLM's scheduler? Run by steps.py with the interpreter of vLLM's own environment.

The same requests as there: so many rows in decode at a context, others waiting, no detokenizer and no client. A step is
``Scheduler.schedule``, ``MessageQueue.enqueue`` of what vLLM's executor broadcasts, to one reader in a process of its
own, and ``Scheduler.update_from_output`` of made-up tokens. Prints one line of JSON for each case; see ``--help`` of
steps.py for what the figures are.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import pickle
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter_ns

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VOCAB = 32_000
WARM_UP_STEPS = 40
PHASES = ("schedule", "broadcast", "update")


def read_all(handle, ready) -> None:
    queue = MessageQueue.create_from_handle(handle, 0)
    ready.set()
    queue.wait_until_ready()
    while queue.dequeue(indefinite=True) is not None:
        pass


def model_directory(directory: str, longest: int) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": longest,
        "torch_dtype": "bfloat16",
    }
    Path(directory, "config.json").write_text(json.dumps(config))
    return directory


class Case:
    """vLLM's scheduler with so many rows in decode, and others waiting."""

    def __init__(self, directory: str, rows: int, context: int, waiting: int, steps: int, block_size: int) -> None:
        longest = context + steps + 2 * WARM_UP_STEPS
        num_blocks = rows * (longest // block_size + 2) + 1
        model = ModelConfig(
            model=model_directory(directory, longest + 2), skip_tokenizer_init=True, max_model_len=longest + 2, seed=0
        )
        scheduling = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows * context, longest + 2),
            max_model_len=longest + 2,
            is_encoder_decoder=False,
        )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
        cache.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        with set_current_vllm_config(config):
            self._scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(
                    num_blocks=num_blocks,
                    kv_cache_tensors=[],
                    kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
                ),
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                log_stats=False,
            )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._random = random.Random(rows * context)
        self._output = longest - context
        for number in range(rows):
            self._add(f"row-{number}", context - number % block_size)
        for number in range(waiting):
            self._add(f"waiting-{number}", 64)

    def _add(self, name: str, length: int) -> None:
        self._scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=self._random.choices(range(VOCAB), k=max(length, 1)),
                sampling_params=SamplingParams(max_tokens=self._output, temperature=0.0, stop_token_ids=[VOCAB - 1]),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def step(self, queue: MessageQueue) -> tuple[dict[str, int], object]:
        t0 = perf_counter_ns()
        planned = self._scheduler.schedule()
        t1 = perf_counter_ns()
        queue.enqueue(("execute_model", (planned,), {}, 0))
        t2 = perf_counter_ns()
        ids = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=[[self._random.randrange(VOCAB - 1)] for _ in ids],
        )
        t3 = perf_counter_ns()
        outputs = self._scheduler.update_from_output(planned, output)
        t4 = perf_counter_ns()
        assert sum(len(one.new_token_ids) for one in outputs[0].outputs) == len(ids)
        return {"schedule": t1 - t0, "broadcast": t2 - t1, "update": t4 - t3}, planned


def measure(case: Case, rows: int, steps: int, queue: MessageQueue) -> dict[str, object]:
    for _ in range(WARM_UP_STEPS):
        _, planned = case.step(queue)
    assert len(planned.num_scheduled_tokens) == rows, "not all rows decode"
    gc.collect()
    gc.freeze()  # as its server does once it is up
    taken = [case.step(queue) for _ in range(steps)]
    gc.unfreeze()
    spent = {phase: [one[phase] / 1000 for one, _ in taken] for phase in PHASES}
    spent["host"] = [sum(parts) for parts in zip(*spent.values(), strict=True)]
    return {
        **{
            f"{phase}_us": {"mean": round(statistics.fmean(values), 1), "p50": round(statistics.median(values), 1)}
            for phase, values in spent.items()
        },
        "bytes": round(statistics.fmean(len(pickle.dumps(planned, protocol=5)) for _, planned in taken[:32])),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", help="JSON: [[rows, context, waiting], ...]")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--block-size", type=int, required=True)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    queue, ready = MessageQueue(1, 1), spawn.Event()
    reader = spawn.Process(target=read_all, args=(queue.export_handle(), ready), daemon=True)
    reader.start()
    ready.wait(120)
    queue.wait_until_ready()
    with tempfile.TemporaryDirectory(prefix="vllm-steps-") as directory:
        for rows, context, waiting in json.loads(arguments.cases):
            case = Case(directory, rows, context, waiting, arguments.steps, arguments.block_size)
            figures = measure(case, rows, arguments.steps, queue)
            print(json.dumps({"rows": rows, "context": context, "waiting": waiting, **figures}), flush=True)
    queue.enqueue(None)
    reader.join(10)


if __name__ == "__main__":
    main()
