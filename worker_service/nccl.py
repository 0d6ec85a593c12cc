"""Form NCCL's communicators, under our watchdog and nobody else's.

torch has a watchdog of its own, which ends the process when a collective fails or takes too long. Only an owner judges
(PROTOCOL C4), so it is told to keep out: what the environment does not say is set here, before the first communicator.
What no longer matters is not set: TORCH_NCCL_AVOID_RECORD_STREAMS is how torch 2.8 and later work, and blocking waits
are off by default.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from service_chassis.errors import InvalidParameter
from service_chassis.telemetry import get_logger
from worker_service.process_group import BrokenCollective, ProcessGroup

AllReduce = Callable[[Tensor], None]  # adds up over the ranks, in place, on the current stream

_SETTINGS: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # no handling of errors: teardown aborts
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that ends the process when torch's watchdog seems stuck
}
# All ranks are on this machine, so none of their traffic has to leave it or to pass a mesh.
_ON_ONE_MACHINE: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo"}
_LOOPBACK = ("127.", "::1", "localhost")


def missing_settings(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return what to set in the environment: what it says itself stays.

    Args:
        environment: of this process.
        host: the address at which this rank is reached by the others.
    """
    wanted = {**_SETTINGS, **(_ON_ONE_MACHINE if host.startswith(_LOOPBACK) else {})}
    return {name: value for name, value in wanted.items() if name not in environment}


def mismatch(torch_cuda: str | None, compiled_for: Sequence[int], installed: Mapping[str, str]) -> str:
    """Say what is wrong with the NCCL that was installed beside torch, or nothing.

    Args:
        torch_cuda: the CUDA version that torch was built for, such as 13.0.
        compiled_for: the NCCL version that torch was compiled with.
        installed: packages of NCCL with their versions. None: torch brings or finds its own, which is as good.
    """
    if torch_cuda is None or not installed:
        return ""
    major = torch_cuda.split(".")[0]
    wanted = f"nvidia-nccl-cu{major}"
    remedy = f"pip install 'maniple[cuda{major}]'"
    if wanted not in installed:
        found = " and ".join(f"{name} {version}" for name, version in sorted(installed.items()))
        return f"torch is built for CUDA {torch_cuda} and needs {wanted}, but {found} is installed: {remedy}"
    if _numbers(installed[wanted]) < tuple(compiled_for[:2]):
        need = ".".join(map(str, compiled_for))
        return f"torch was compiled with NCCL {need}, and the older {wanted} {installed[wanted]} is installed: {remedy}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def installed_packages() -> dict[str, str]:
    """Return the packages of NCCL that are installed, with their versions."""
    found = {}
    for name in ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def form_nccl(
    store: c10d.Store, group: ProcessGroup, device: torch.device, environment: MutableMapping[str, str] = os.environ
) -> Any:
    """Return a communicator of the group's ranks, connected.

    Raises:
        InvalidParameter: this torch has no NCCL, or one that does not fit is installed.
    """
    if not dist.is_nccl_available():
        raise InvalidParameter("device", "cuda", "must be used on one rank: this torch has no NCCL")
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if rule := mismatch(torch.version.cuda, version, installed_packages()):
        raise InvalidParameter("device", "cuda", rule)
    settings = missing_settings(environment, group.host)
    environment.update(settings)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = NO_TIMEOUT
    torch.cuda.set_device(device)
    backend = nccl(store, group.rank, group.world_size, options)
    backend.eager_connect_single_device(device)  # here, where waiting is expected, and not in the first step
    get_logger().info("nccl.formed", version=".".join(map(str, version)), device=str(device), environment=settings)
    return backend


# Ranks judge nobody: a rank may wait in a collective for a step that a new owner has yet to relay (PROTOCOL C4).
NO_TIMEOUT = datetime.timedelta(days=3650)


def nccl_all_reduce(backend: Any, group: ProcessGroup) -> AllReduce:
    """Return NCCL's own sum, on the stream that computes: nothing to wait for, and a graph can hold it."""
    options = dist.AllreduceOptions()
    options.timeout = NO_TIMEOUT
    options.asyncOp = False

    def all_reduce(x: Tensor) -> None:
        try:
            work = backend.allreduce([x], options)
        except RuntimeError as error:
            raise BrokenCollective(f"allreduce: {error}") from error
        if work is not None:
            work.wait()

    return all_reduce


# How sums over CUDA devices are taken, by name; the first that takes a formed group serves it. A sum over symmetric
# memory or one of one's own is put in front: a function of (communicator, group) that returns None where it does not
# fit, such as ranks on several machines.
ALL_REDUCES: dict[str, Callable[[Any, ProcessGroup], AllReduce | None]] = {"nccl": nccl_all_reduce}


def choose_all_reduce(backend: Any, group: ProcessGroup) -> tuple[str, AllReduce]:
    """Return the first way to add up that takes this group, with its name."""
    for name, make in ALL_REDUCES.items():
        made = make(backend, group)
        if made is not None:
            return name, made
    raise InvalidParameter("device", "cuda", "must be used on one rank: no way to add up over these ranks is known")
