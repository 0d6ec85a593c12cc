"""Memory that runs out: what is said of it, and whether the rank survives."""

from __future__ import annotations

import re
import weakref

import pytest
import torch

from service_chassis.errors import InvalidParameter
from worker_service.out_of_memory import DeviceOutOfMemory, explaining_memory, is_out_of_memory, sentence
from worker_service.platforms.base import GIB, MemoryReading
from worker_service.platforms.cpu import CpuPlatform

FULL = MemoryReading(total=80 * GIB, available=GIB // 2, own=70 * GIB)
# As torch words it on a device.
COMPLAINT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 500.00 MiB is "
    "free. Process 123 has 78.61 GiB memory in use."
)


class FullPlatform(CpuPlatform):
    def memory(self) -> MemoryReading:
        return FULL


@pytest.mark.parametrize(
    ("doing", "flag"),
    [
        ("load", "--tensor-parallel-size"),
        ("profile", "--max-num-batched-tokens"),
        ("allocate", "--kv-cache-memory"),
        ("capture", "--enforce-eager"),
        ("step", "--gpu-memory-utilization"),
    ],
)
def test_the_sentence_says_what_was_wanted_who_has_it_and_what_helps(doing: str, flag: str) -> None:
    said = sentence(doing, torch.OutOfMemoryError(COMPLAINT), FULL, {"weights": 60 * GIB, "KV cache": 0})
    assert said.startswith(
        "the device has no 2.50 GiB more: of 80.00 GiB this rank holds 70.00 GiB (60.00 GiB weights), others 9.50 GiB, "
        "0.50 GiB are free; use "
    )
    assert flag in said


def test_what_the_allocator_of_a_cpu_says_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert "no 268435456.00 GiB more" in sentence("load", caught.value, FULL, {})
    assert not is_out_of_memory(RuntimeError("something else"))
    assert "no more:" in sentence("load", MemoryError(), FULL, {})


def test_a_stage_is_refused_and_lets_go_of_what_it_had() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def load() -> None:
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(COMPLAINT)

    rule = re.escape("model='/m': must fit the memory there is: the device has no 2.50 GiB more")
    with (
        pytest.raises(InvalidParameter, match=rule),
        explaining_memory("load", FullPlatform(1), {}, ("model", "/m")),
    ):
        load()
    assert held[0]() is None


def test_in_a_step_it_is_the_end() -> None:
    platform = FullPlatform(1)
    with pytest.raises(DeviceOutOfMemory, match=r"no 2\.50 GiB more"), explaining_memory("step", platform, {}):
        raise torch.OutOfMemoryError(COMPLAINT)
    with pytest.raises(RuntimeError, match="something else"), explaining_memory("step", platform, {}):
        raise RuntimeError("something else")
