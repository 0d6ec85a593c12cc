"""One CUDA device."""

from __future__ import annotations

import torch

from service_chassis.errors import InvalidParameter
from worker_service.platforms.base import MemoryReading
from worker_service.platforms.device_memory import DeviceCounts, kv_bytes_left, peak_of, reading_of, share_rule


class CudaPlatform:
    """The CUDA device with an index, as CUDA counts those that CUDA_VISIBLE_DEVICES leaves."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        if not torch.cuda.is_available():
            raise InvalidParameter("device", "cuda", "must be usable by this torch, which finds no CUDA device")
        if index >= torch.cuda.device_count():
            raise InvalidParameter("device", f"cuda:{index}", f"must be one of {torch.cuda.device_count()} devices")
        self.device = torch.device("cuda", index)
        self._first: DeviceCounts | None = None

    def share(self, num_ranks: int) -> None:
        """The host has little to do; the device is this rank's own."""

    def bind(self) -> None:
        torch.cuda.set_device(self.device)
        if self._first is None:
            self._first = self._counts()

    def _counts(self) -> DeviceCounts:
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceCounts(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(self.device),
            allocated=torch.cuda.memory_allocated(self.device),
            peak_reserved=torch.cuda.max_memory_reserved(self.device),
        )

    def _began(self) -> DeviceCounts:
        assert self._first is not None, "the device is bound before it is used"
        return self._first

    def memory(self) -> MemoryReading:
        return reading_of(self._counts(), self._began())

    def measure_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return peak_of(self._counts(), self._began())

    def share_rule(self, utilization: float) -> str:
        return share_rule(self._began(), utilization)

    def free_for_kv(self, reading: MemoryReading, base_bytes: int) -> int:
        return max(0, reading.available - (base_bytes - reading.own))

    def kv_budget(self, reading: MemoryReading, base_bytes: int, utilization: float, needed_bytes: int) -> int:
        return min(kv_bytes_left(reading, base_bytes, utilization), needed_bytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
