"""Pick the device: the one place that knows all kinds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from service_chassis.errors import InvalidParameter
from worker_service.platforms.base import Platform
from worker_service.platforms.cpu import CpuPlatform
from worker_service.platforms.cuda import CudaPlatform

# What is missing for kinds of devices that torch knows. A kind that has it moves to ``choose_platform``.
_MISSING: Mapping[str, Callable[[], str]] = {
    "rocm": lambda: (
        f"is not served yet: {_torch_build('hip')}, kernels/maniple_kernels/gpu/shapes.py has no row for an AMD "
        "architecture, and no kernel was compiled or run on one"
    ),
    "xpu": lambda: (
        f"is not served yet: {_torch_build('xpu')}, no kernel was compiled or run on an Intel GPU, and collectives "
        "between them (XCCL) are not formed"
    ),
}


def choose_platform(
    device: str, *, index: int, num_threads: int, num_groups_sharing: int = 1, device_id: int | None = None
) -> Platform:
    """Return the platform that ``device`` names; "auto" is an accelerator where torch finds one.

    Args:
        device: auto, cpu, cuda, rocm or xpu.
        index: of the device, counted on where there are fewer.
        num_threads: of one forward on a CPU.
        num_groups_sharing: groups on this machine.
        device_id: of the device, where somebody said which: there must be one.
    Raises:
        InvalidParameter: it names none, one that is not there, or one that is not served.
    """
    kind = _kind_of_build() if device == "auto" else device
    if kind in _MISSING:
        raise InvalidParameter("device", kind, f"{_MISSING[kind]()}; --device cpu computes on this machine's cores")
    if kind == "cuda" and torch.version.hip is not None:
        raise InvalidParameter("device", "cuda", "must be rocm for this torch, which is built for AMD devices")
    if kind not in ("cpu", "cuda"):
        raise InvalidParameter("device", device, "must be auto, cpu, cuda, rocm or xpu")
    if kind == "cpu":
        if device_id is not None:
            raise InvalidParameter("device_ids", device_id, "needs --device cuda: a CPU has no devices to choose from")
        return CpuPlatform(num_threads, num_groups_sharing)
    num_devices = torch.cuda.device_count()
    if device_id is not None and device_id >= num_devices:
        raise InvalidParameter("device_ids", device_id, _unknown_id(num_devices))
    return CudaPlatform(index % max(1, num_devices) if device_id is None else device_id)


def _kind_of_build() -> str:
    """Return what this torch computes on: its build decides, since there is one for each kind."""
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip is not None else "cuda"
    return "xpu" if torch.xpu.is_available() else "cpu"


def _torch_build(what: str) -> str:
    version = getattr(torch.version, what, None)
    return (
        f"torch {torch.__version__} is built for {what} {version}, but"
        if version
        else (f"torch {torch.__version__} is not built for it")
    )


def _unknown_id(num_devices: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    left = "" if visible is None else f", which is what CUDA_VISIBLE_DEVICES={visible} leaves, counted from 0"
    if num_devices == 0:
        return f"must name a device of this machine: torch finds none{left}"
    return f"must be in [0, {num_devices - 1}]: torch finds {num_devices} CUDA devices{left}"
