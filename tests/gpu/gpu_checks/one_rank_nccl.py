"""A communicator of one rank: formed, added up with, recorded in a graph, aborted."""

from __future__ import annotations

import os
import time

import torch
from torch._C import _distributed_c10d as c10d

from gpu_checks.outcome import Report
from worker_service.nccl import choose_all_reduce, form_nccl, installed_packages
from worker_service.process_group import LoneProcessGroup
from worker_service.tensor_group import form_store


def run(device: str, report: Report) -> None:
    where = torch.device("cuda", 0)
    torch.cuda.set_device(where)
    group = LoneProcessGroup("gpu-check")
    before = torch.cuda.mem_get_info(0)[0]
    began = time.monotonic()
    store: c10d.Store = form_store(group)
    backend = form_nccl(store, group, where)
    report.facts["formed in s"] = round(time.monotonic() - began, 2)
    report.facts["MiB that it takes"] = (before - torch.cuda.mem_get_info(0)[0]) // 2**20
    report.facts["packages"] = installed_packages()
    report.facts["environment"] = {name: os.environ[name] for name in sorted(os.environ) if "NCCL" in name}
    name, all_reduce = choose_all_reduce(backend, group)
    report.facts["adds up by"] = name
    x = torch.randn((256, 4096), device=where, dtype=torch.bfloat16)
    expected = x.clone()
    all_reduce(x)
    assert torch.equal(x, expected), "a sum over one rank is not what it was"

    graph, y = torch.cuda.CUDAGraph(), torch.empty_like(x)
    torch.cuda.synchronize()
    # As graphs are recorded: NCCL's own threads may use CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y.copy_(x).add_(1)
        all_reduce(y)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected + 1), "a sum in a graph is not what it is outside"
    began = time.monotonic()
    backend.abort()
    report.facts["aborted in s"] = round(time.monotonic() - began, 3)
    assert time.monotonic() - began < 2
