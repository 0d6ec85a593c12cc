"""Whose an accelerator's memory is, from counts that no driver has to give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from service_chassis.errors import InvalidParameter
from worker_service.platforms import choose
from worker_service.platforms.base import GIB
from worker_service.platforms.choose import choose_platform
from worker_service.platforms.cuda import CudaPlatform
from worker_service.platforms.device_memory import DeviceCounts, kv_bytes_left, peak_of, reading_of, share_rule


def counts(free: float, reserved: float = 0, allocated: float = 0, peak: float = 0) -> DeviceCounts:
    return DeviceCounts(
        total=80 * GIB,
        free=int(free * GIB),
        reserved=int(reserved * GIB),
        allocated=int(allocated * GIB),
        peak_reserved=int(peak * GIB),
    )


def test_what_torch_does_not_know_of_is_ours_if_it_came_after_us() -> None:
    first = counts(free=74)  # six are somebody else's
    now = counts(free=50, reserved=20, allocated=17)  # so ten are outside torch: four more than at first
    reading = reading_of(now, first)
    assert reading.own == 21 * GIB
    assert reading.available == 53 * GIB
    assert reading.foreign == 6 * GIB


def test_memory_that_others_gave_back_is_never_negative() -> None:
    reading = reading_of(counts(free=70, reserved=9, allocated=9), counts(free=74))
    assert (reading.own, reading.foreign) == (9 * GIB, GIB)


def test_the_peak_is_torchs_and_what_lies_outside_it() -> None:
    first = counts(free=74)
    assert peak_of(counts(free=50, reserved=20, allocated=17, peak=26), first) == 30 * GIB
    assert peak_of(counts(free=50, reserved=20, allocated=17, peak=3), first) == 24 * GIB


@pytest.mark.parametrize(
    ("now", "base", "utilization", "left"),
    [
        (counts(free=53, reserved=20, allocated=20), 30, 0.9, 42),  # of 72, since there is enough
        (counts(free=5, reserved=20, allocated=20), 30, 0.9, 0),  # the step itself does not fit
        (counts(free=40, reserved=20, allocated=20), 25, 0.9, 35),  # of what is there
        (counts(free=50, reserved=20, allocated=20), 30, 0.25, 0),
    ],
)
def test_kv_takes_the_share_that_is_really_there(now: DeviceCounts, base: int, utilization: float, left: int) -> None:
    own_outside = 80 - now.free // GIB - 20
    first = counts(free=80 - own_outside)  # all outside torch is foreign: 20 are ours
    assert kv_bytes_left(reading_of(now, first), base * GIB, utilization) == left * GIB


def test_a_share_that_others_made_impossible_is_refused_with_figures() -> None:
    assert share_rule(counts(free=72), 0.9) == ""
    assert share_rule(counts(free=71.5), 0.9) == ""  # our own context
    rule = share_rule(counts(free=50), 0.9)
    for part in ("80.00 GiB", "72.00 GiB", "30.00 GiB were taken", "50.00 GiB were free", "0.62 or less", "nvidia-smi"):
        assert part in rule
    assert share_rule(counts(free=50), 0.62) == ""
    assert "or less" not in share_rule(counts(free=0.5), 0.9)


class FakeDriver:
    """A driver and an allocator that say what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int = 2) -> None:
        self.now = counts(free=74)
        self.calls: list[str] = []
        fakes: dict[str, Callable[..., object]] = {
            "is_available": lambda: num_devices > 0,
            "device_count": lambda: num_devices,
            "set_device": lambda device: self.calls.append(f"set {device}"),
            "mem_get_info": lambda device: (self.now.free, self.now.total),
            "memory_reserved": lambda device: self.now.reserved,
            "memory_allocated": lambda device: self.now.allocated,
            "max_memory_reserved": lambda device: self.now.peak_reserved,
            "empty_cache": lambda: self.calls.append("empty"),
            "reset_peak_memory_stats": lambda device: self.calls.append("reset"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_a_cuda_device_counts_from_when_it_was_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    platform = CudaPlatform(1)
    platform.bind()
    assert platform.share_rule(0.9) == ""
    driver.now = counts(free=50, reserved=20, allocated=17, peak=26)
    platform.bind()  # a later stage begins the count no second time
    assert driver.calls == ["set cuda:1", "set cuda:1"]
    assert platform.memory().foreign == 6 * GIB
    assert platform.peak() == 30 * GIB
    assert platform.kv_budget(platform.memory(), 30 * GIB, 0.9, 100 * GIB) == 42 * GIB
    assert platform.kv_budget(platform.memory(), 30 * GIB, 0.9, GIB) == GIB
    assert platform.free_for_kv(platform.memory(), 30 * GIB) == 44 * GIB
    assert "needs" not in platform.share_rule(0.9)


def refused(device: str, **more: int) -> str:
    with pytest.raises(InvalidParameter) as error:
        choose_platform(device, index=0, num_threads=1, **more)
    return error.value.message


def test_the_device_is_chosen_by_what_torch_was_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch)
    assert choose_platform("auto", index=3, num_threads=1).device == torch.device("cuda", 1)  # counted on
    assert choose_platform("cuda", index=3, num_threads=1, device_id=0).device == torch.device("cuda", 0)
    assert choose_platform("cpu", index=3, num_threads=1).name == "cpu"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "is built for hip 7.1" in refused("auto")
    assert "must be rocm" in refused("cuda")
    assert choose_platform("cpu", index=0, num_threads=1).name == "cpu"


def test_devices_that_are_not_served_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, num_devices=0)
    for device, part in (("rocm", "AMD"), ("xpu", "Intel")):
        message = refused(device)
        assert "is not served yet: torch" in message
        assert "is not built for it" in message
        assert part in message
        assert "--device cpu" in message
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert "xpu" in refused("auto")
    assert "must be auto, cpu, cuda, rocm or xpu" in refused("tpu")


def test_an_id_that_names_no_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    message = refused("cuda", device_id=4)
    assert message.startswith("device_ids=4")
    assert "must be in [0, 1]" in message
    assert "CUDA_VISIBLE_DEVICES=4,6" in message
    FakeDriver(monkeypatch, num_devices=0)
    assert "torch finds none" in refused("cuda", device_id=0)
    assert "needs --device cuda" in refused("cpu", device_id=0)
    assert choose._torch_build("hip").endswith("is not built for it")
