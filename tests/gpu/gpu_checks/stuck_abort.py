"""A rank whose collective is queued behind a kernel that does not end is gone two seconds after it was told to go."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from gpu_checks.outcome import Report

_LIMIT_S = 2.0
_PROGRAM = """
import faulthandler, sys, time, threading
import torch
from worker_service.nccl import choose_all_reduce, form_nccl
from worker_service.process_group import LoneProcessGroup
from worker_service.server import _EXIT_WITHIN_S
from worker_service.tensor_group import form_store

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
group = LoneProcessGroup("stuck")
backend = form_nccl(form_store(group), group, device)
_, all_reduce = choose_all_reduce(backend, group)
x = torch.ones(1 << 20, device=device)
all_reduce(x)
torch.cuda.synchronize()
stuck = threading.Event()

def device_thread():
    torch.cuda._sleep(1 << 62)  # cycles: centuries
    all_reduce(x)
    stuck.set()
    torch.cuda.current_stream().synchronize()

threading.Thread(target=device_thread, daemon=True).start()
assert stuck.wait(20)
time.sleep(0.2)
print("stuck", flush=True)
sys.stdin.readline()  # told to go
faulthandler.dump_traceback_later(_EXIT_WITHIN_S, exit=True)  # as a worker does
threading.Thread(target=backend.abort, daemon=True).start()
time.sleep(60)
"""


def run(device: str, report: Report) -> None:
    words = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        try:
            assert rank.stdin is not None
            assert rank.stdout is not None
            said = rank.stdout.readline()
            if said != b"stuck\n":
                assert rank.stderr is not None
                raise AssertionError(f"it did not come so far: {rank.stderr.read()[-600:]!r}")
            began = time.monotonic()
            rank.stdin.write(b"go\n")
            rank.stdin.flush()
            rank.wait(timeout=30)
            gone_s = time.monotonic() - began
        finally:
            rank.kill()
    report.facts["gone after s"] = round(gone_s, 2)
    report.facts["exit code"] = rank.returncode
    assert gone_s <= _LIMIT_S, f"gone only after {gone_s:.1f} s"
    assert not Path(f"/proc/{rank.pid}").exists()
