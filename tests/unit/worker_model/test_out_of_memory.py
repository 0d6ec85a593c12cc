"""Memory that runs out: what is said of it, and whether the rank survives."""

from __future__ import annotations

import re
import weakref

import numpy as np
import pytest
import torch

from service_chassis.errors import InvalidParameter
from support.runner_driver import RunnerDriver
from support.tiny_checkpoints import tiny_config, write_checkpoint
from worker_service.heartbeat import Vitals, failure_of
from worker_service.out_of_memory import DeviceOutOfMemory, explaining_memory, is_out_of_memory, sentence
from worker_service.platforms.base import GIB, MemoryReading
from worker_service.platforms.cpu import CpuPlatform
from worker_service.runner import LoadOptions
from worker_service.step_loop import StepLoop
from worker_service.step_work import Mode, StepWork, TableChange, TableOp

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
        explaining_memory("load", FullPlatform(1), dict, ("model", "/m")),
    ):
        load()
    assert held[0]() is None


def test_in_a_step_it_is_the_end() -> None:
    platform = FullPlatform(1)
    with pytest.raises(DeviceOutOfMemory, match=r"no 2\.50 GiB more"), explaining_memory("step", platform, dict):
        raise torch.OutOfMemoryError(COMPLAINT)
    with pytest.raises(RuntimeError, match="something else"), explaining_memory("step", platform, dict):
        raise RuntimeError("something else")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> RunnerDriver:
    return RunnerDriver(write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("LlamaForCausalLM")))


class Complaining:
    """A forward for which there is no memory."""

    attention = graphs = None

    def __call__(self, *arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError(COMPLAINT)


def test_the_device_that_is_full_in_a_step_is_the_ranks_failure_with_sizes(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.runner, "_forward", Complaining())
    failures: list[tuple[int, Exception]] = []
    loop = StepLoop(Vitals("x"), lambda callback: callback(), lambda done: None, lambda *told: failures.append(told))
    loop.runner = driver.runner
    loop.start()
    row = driver.enter(0, [1, 2, 3])
    tables = (TableChange(0, 0, TableOp.REPLACE, (1,)),)
    counts = {"num_computed_tokens": np.array([0], np.int32), "num_scheduled_tokens": np.array([3], np.int32)}
    loop.submit(
        StepWork(
            1,
            Mode.RUN,
            new_rows=(row,),
            table_changes=tables,
            rows=np.array([0], np.int32),
            samples=np.array([True]),
            **counts,
        )
    )
    loop.call(lambda: None).result(timeout=20)
    loop.close()
    [(step, error)] = failures
    failure = failure_of(error, step=step)
    assert (failure.kind, failure.step) == ("DeviceOutOfMemory", 1)
    assert failure.message.startswith("the device has no 2.50 GiB more: of ")
    assert "weights" in failure.message
    assert "KV cache" in failure.message
    driver.runner.reset()


def test_what_has_no_room_while_stages_run_is_refused_by_its_parameter(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = driver.runner
    with pytest.raises(InvalidParameter, match=r"num_kv_blocks=1099511627776: must fit .* --num-kv-blocks"):
        runner.allocate_kv_cache(1 << 40)
    monkeypatch.setattr(runner, "_forward", Complaining())
    with pytest.raises(InvalidParameter, match=r"max_num_batched_tokens=256: must fit .* --max-num-batched-tokens"):
        runner.profile_memory(0.9)
    monkeypatch.setattr(CpuPlatform, "share_rule", lambda self, utilization: f"{utilization} is too much")
    with pytest.raises(InvalidParameter, match=r"gpu_memory_utilization=0.9: 0.9 is too much"):
        runner.profile_memory(0.9)
    monkeypatch.setattr("worker_service.model_runner.load_model", Complaining())
    with pytest.raises(InvalidParameter, match=r"model='/m': must fit the memory"):
        runner.load_model(LoadOptions(model="/m"), lambda share, what: None)
