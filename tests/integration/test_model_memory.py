"""Memory as it really is, each in a process of its own: what loading takes, and what the profile predicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from support.demo_model import demo_directory
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

PREAMBLE = """
import json, sys
from pathlib import Path
import numpy as np, torch
from worker_service.model_runner import TorchModelRunner
from worker_service.runner import LoadOptions
from worker_service.step_work import Mode, NewRow, RowSampling, StepWork, TableChange, TableOp

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

runner = TorchModelRunner(device="cpu", num_threads=1)
"""

LOAD = """
import maniple_kernels.cpu.decoder_layer, maniple_kernels.cpu.linear  # the compiler, which no model makes larger
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
facts = runner.load_model(LoadOptions(model=sys.argv[1]), lambda share, what: None)
print(json.dumps({"grown": status("VmHWM") - before, "kept": status("VmRSS") - before, "weights": facts.weight_bytes}))
"""

SERVE = """
budget, block_size = 256, 16
options = LoadOptions(model=sys.argv[1], max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=2048)
facts = runner.load_model(options, lambda share, what: None)
memory = runner.profile_memory(0.9)
num_blocks = (400 << 20) // facts.block_bytes
kv_bytes = runner.allocate_kv_cache(num_blocks)
runner.warm_up((), True, lambda share, what: None)
Path("/proc/self/clear_refs").write_text("5")
# A step of the whole budget, and then every block is written, by copies.
table = tuple(range(1, budget // block_size + 1))
tokens = np.arange(budget, dtype=np.int32)
new = NewRow(req_index=0, row_key=1, request_id="r", sample_index=0, token_ids=tokens, num_prompt_tokens=budget,
             num_computed_tokens=0, num_prefill_tokens=budget, sampling=RowSampling())
work = StepWork(step=1, mode=Mode.RUN, new_rows=(new,), table_changes=(TableChange(0, 0, TableOp.REPLACE, table),),
                rows=np.array([0], np.int32), num_computed_tokens=np.array([0], np.int32),
                num_scheduled_tokens=np.array([budget], np.int32), samples=np.array([True]))
runner.apply(work)
runner.execute(work)
for first in range(len(table) + 1, num_blocks, 20):
    copies = tuple((0, 1, block) for block in range(first, min(first + 20, num_blocks)))
    runner.apply(StepWork(step=2, mode=Mode.APPLY_ONLY, block_copies=copies))
print(json.dumps({"predicted": memory.base_bytes + kv_bytes, "real": status("VmHWM"), "weights": memory.weight_bytes,
                  "kv": kv_bytes, "kv_offered": memory.kv_bytes, "total": memory.total_bytes}))
"""


def measure(script: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", PREAMBLE + script, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_loading_takes_the_weights_and_at_most_one_file_beside_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 4000, "head_dim": 64}
    config = tiny_config("LlamaForCausalLM", torch_dtype="bfloat16", **sizes)
    num_files = 6
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tiny_tensors(config).items()}
    write_checkpoint(tmp_path, config, tensors, num_files=num_files)
    one_file = max(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    got = measure(LOAD, tmp_path)
    assert got["weights"] > 80 << 20
    slack = 24 << 20  # what first uses of oneDNN and of the allocator take, whatever the model; 17 MiB were seen
    assert got["grown"] < got["weights"] + one_file + slack
    assert got["kept"] < got["weights"] + slack


def test_predicted_memory_is_the_real_one_within_a_tenth() -> None:
    got = measure(SERVE, demo_directory())
    assert got["kv"] > got["weights"]
    assert abs(got["real"] - got["predicted"]) < 0.1 * got["predicted"], got
    assert 0 < got["kv_offered"] < got["total"] / 2
