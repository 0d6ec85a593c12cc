"""One CUDA device."""

from __future__ import annotations

import torch

from service_chassis.errors import InvalidParameter
from worker_service.platforms.base import MemoryReading


class CudaPlatform:
    """The CUDA device with this worker's local rank."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        if not torch.cuda.is_available():
            raise InvalidParameter("device", "cuda", "must be usable by this torch, which finds no CUDA device")
        if index >= torch.cuda.device_count():
            raise InvalidParameter("device", f"cuda:{index}", f"must be one of {torch.cuda.device_count()} devices")
        self.device = torch.device("cuda", index)

    def share(self, num_ranks: int) -> None:
        """The host has little to do; the device is this rank's own."""

    def bind(self) -> None:
        torch.cuda.set_device(self.device)

    def memory(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        # What torch keeps reserved and does not use is ours to give to KV.
        spare = reserved - torch.cuda.memory_allocated(self.device)
        return MemoryReading(total=total, available=free + spare, own=reserved - spare)

    def measure_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def free_for_kv(self, reading: MemoryReading, base_bytes: int) -> int:
        return max(0, reading.available - (base_bytes - reading.own))

    def kv_budget(self, reading: MemoryReading, base_bytes: int, utilization: float, needed_bytes: int) -> int:
        free = min(reading.available - (base_bytes - reading.own), int(reading.total * utilization) - base_bytes)
        return max(0, min(free - reading.foreign, free, needed_bytes))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
