"""The checks there are, in the order in which they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from gpu_checks.outcome import Report


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: a function ``run(device, report)`` of a module, which raises where something is wrong."""

    name: str
    module: str
    about: str
    on_cpu: bool = True  # some of it
    needs: tuple[str, ...] = ("torch", "triton", "worker_service.step_loop")  # to be importable
    limit_s: float = 60.0  # in a process of its own
    aims_only: bool = False  # figures: a rehearsal on the CPU says nothing of a device

    def load(self) -> Callable[[str, Report], None]:
        run: Callable[[str, Report], None] = importlib.import_module(f"gpu_checks.{self.module}").run
        return run


CHECKS = (
    Check(name="surroundings", module="surroundings", about="versions, device, what is missing", needs=()),
    Check(
        name="kernels",
        module="kernels",
        about="every kernel against its plain-torch reference",
        needs=("torch", "triton", "structlog"),
    ),
    Check(name="graphs", module="graphs", about="graph replay gives what single launches give"),
    Check(name="steps in flight", module="steps_in_flight", about="launched ahead or one by one: the same tokens"),
    Check(name="memory", module="memory", about="whose memory is counted, refusals, no memory in a step"),
    Check(name="sleep", module="sleeping", about="sleep and wake, with memory figures and the same tokens"),
    Check(name="nccl", module="one_rank_nccl", about="one rank's communicator: sum, in a graph, abort", on_cpu=False),
    Check(
        name="abort",
        module="stuck_abort",
        about="a rank with a collective behind a kernel without end is gone within 2 s",
        on_cpu=False,
    ),
    Check(name="hot path", module="hot_path", about="no hidden synchronisation in steady steps"),
    Check(
        name="floors",
        module="floors_8b",
        about="decode and prefill of an 8B shape against bandwidth and matrix rate; the host's share",
        limit_s=170.0,
        aims_only=True,
    ),
)
NEEDS_TWO_DEVICES = (
    "sums over two or more ranks by NCCL",
    "a rank that hangs in a collective because the other is gone (case A9 on devices)",
)
