"""Pick the device."""

from __future__ import annotations

import torch

from service_chassis.errors import InvalidParameter
from worker_service.platforms.base import Platform
from worker_service.platforms.cpu import CpuPlatform
from worker_service.platforms.cuda import CudaPlatform


def choose_platform(device: str, *, index: int, num_threads: int, num_groups_sharing: int = 1) -> Platform:
    """Return the platform that ``device`` names; "auto" is a CUDA device where torch finds one, the one with ``index``.

    Raises:
        InvalidParameter: it names none, or one that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return CpuPlatform(num_threads, num_groups_sharing)
    if device == "cuda":
        return CudaPlatform(index % max(1, torch.cuda.device_count()))
    raise InvalidParameter("device", device, "must be auto, cpu or cuda")
