"""The torch runner with steps in flight, on a device that is done when the test says so: nothing but time differs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import support.triton_interpreter  # noqa: F401  # before the kernels
from support.recorders import RerunRecorder
from support.runner_driver import NUM_BLOCKS, RunnerDriver, single_thread
from support.steady_traffic import serve
from support.stepper import Stepper
from support.tiny_checkpoints import tiny_config, write_checkpoint
from worker_service.forward.assemble import ForwardOptions
from worker_service.forward.device_copies import Landing
from worker_service.forward.launched_step import LaunchedStep
from worker_service.sampling.device_sampler import DeviceSampler
from worker_service.sampling.sampler import NonFiniteLogits
from worker_service.step_work import NewRow, Pooling, RowSampling, StepWork

DEADLINE_S = 20


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    single_thread()
    with np.errstate(all="ignore"):  # the interpreter computes masked lanes too
        yield


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> RunnerDriver:
    """A runner that computes on the CPU, samples by the kernels for devices, and keeps its arrays as on one."""
    directory = tmp_path_factory.mktemp("model")
    config = tiny_config("LlamaForCausalLM", num_hidden_layers=1)
    forward = ForwardOptions(recorder=RerunRecorder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker_service.forward.step_outputs.choose_sampler", DeviceSampler)
        return RunnerDriver(write_checkpoint(directory, config), forward=forward)


class LateDevice:
    """Copies to the host that arrive when they are released; at once where the device thread itself waits."""

    def __init__(self) -> None:
        self.landings: list[Any] = []
        self._news = threading.Condition()

    def landing(self, tensor: Tensor) -> Any:
        device, content, arrived = self, tensor.clone(), threading.Event()

        class Landing:
            def wait(self) -> None:
                if threading.current_thread().name == "device":
                    arrived.set()
                assert arrived.wait(DEADLINE_S)

            def take(self) -> np.ndarray:
                self.wait()
                return content.numpy()

            def release(self) -> None:
                arrived.set()

        made = Landing()
        with device._news:
            device.landings.append(made)
            device._news.notify_all()
        return made

    def await_launch(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.landings) >= count, DEADLINE_S)

    def release(self, count: int) -> None:
        for landing in self.landings[:count]:
            landing.release()


class LateStepper(Stepper):
    """Lets the device be done with a step only when the next one was launched."""

    def __init__(self, device: LateDevice, runner: Any) -> None:
        super().__init__(runner, num_blocks=NUM_BLOCKS, block_size=16, ahead=2)
        self._device = device
        self.most_launched = 0

    def submit(self, counts: dict[int, int], new: Sequence[NewRow] = (), finished: Sequence[int] = ()) -> None:
        super().submit(counts, new, finished)
        self._device.await_launch(self._step)
        deadline = time.monotonic() + DEADLINE_S  # it notes what it launched a moment later
        while len(self.loop._launched) < min(self._step, 2) and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.most_launched = max(self.most_launched, len(self.loop._launched))
        self._device.release(self._step - 1)

    def drain(self) -> None:
        self._device.release(self._step)
        super().drain()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    made = LateDevice()
    for module in ("worker_service.sampling.device_sampler", "worker_service.forward.step_outputs"):
        monkeypatch.setattr(f"{module}.Landing", made.landing)
    return made


def one_by_one(driver: RunnerDriver) -> tuple[list[list[int]], list[int]]:
    driver.runner.reset()
    stepper = Stepper(driver.runner, num_blocks=NUM_BLOCKS, block_size=16, ahead=1)
    tokens = serve(stepper)
    stepper.close()
    return tokens, [done.token_digest for done in stepper.completed]


def test_steps_in_flight_sample_the_same_tokens(driver: RunnerDriver, device: LateDevice) -> None:
    driver.runner.reset()
    stepper = LateStepper(device, driver.runner)
    tokens = serve(stepper)
    stepper.close()
    digests = [done.token_digest for done in stepper.completed]
    assert stepper.most_launched == 2
    with pytest.MonkeyPatch.context() as patch:
        for module in ("worker_service.sampling.device_sampler", "worker_service.forward.step_outputs"):
            patch.setattr(f"{module}.Landing", Landing)
        assert (tokens, digests) == one_by_one(driver)
    batch = driver.runner._batch
    assert batch is not None
    assert not batch._pending


def enter(driver: RunnerDriver, row: int, sampling: RowSampling, pooling: Pooling | None = None) -> NewRow:
    return replace(driver.enter(row, [3, 1, 4], sampling), pooling=pooling)


@pytest.mark.parametrize(
    ("sampling", "pooling", "plain"),
    [
        (RowSampling(), None, True),
        (
            RowSampling(temperature=1.0, repetition_penalty=1.2, logit_bias=((3, 1.0),), min_tokens=2),
            None,
            True,
        ),
        (RowSampling(num_logprobs=0), None, False),
        (RowSampling(num_prompt_logprobs=1), None, False),
        (RowSampling(bad_words=((5, 6),)), None, False),
        (RowSampling(), Pooling(is_mean=True, normalize=False), False),
    ],
)
def test_rows_that_need_more_than_tokens_are_waited_for(
    driver: RunnerDriver, sampling: RowSampling, pooling: Pooling | None, plain: bool
) -> None:
    runner = driver.runner
    runner.reset()
    outputs = runner._outputs
    assert outputs is not None
    stepper = Stepper(runner, num_blocks=NUM_BLOCKS, block_size=16)
    works: list[StepWork] = []
    stepper.loop.submit = works.append  # type: ignore[method-assign]
    stepper.submit({0: 3}, new=[replace(stepper.enter(0, [3, 1, 4], sampling=sampling), pooling=pooling)])
    stepper.close()
    assert outputs.is_plain(works[0]) is plain  # before it is applied
    runner.apply(works[0])
    assert outputs.is_plain(works[0]) is plain  # and after
    assert isinstance(runner.execute(works[0]), LaunchedStep) is plain
    runner.reset()


def test_steps_that_wait_for_a_mask_or_compute_nothing_are_not_launched(driver: RunnerDriver) -> None:
    outputs = driver.runner._outputs
    assert outputs is not None
    driver.runner.reset()
    work = StepWork(1, mode=None, rows=np.array([0], np.int32))  # type: ignore[arg-type]
    assert outputs.is_plain(work)
    assert not outputs.is_plain(replace(work, awaits_mask=(0,)))
    assert not outputs.is_plain(replace(work, rows=np.zeros(0, np.int32)))


def test_logits_that_are_not_finite_fail_the_step_that_has_them(driver: RunnerDriver) -> None:
    runner = driver.runner
    runner.reset()
    outputs = runner._outputs
    assert outputs is not None
    compute = outputs.compute_logits
    outputs.compute_logits = lambda hidden: torch.full((len(hidden), 211), torch.nan)  # type: ignore[method-assign]
    stepper = Stepper(runner, num_blocks=NUM_BLOCKS, block_size=16)
    try:
        stepper.submit({0: 3}, new=[stepper.enter(0, [3, 1, 4])])
        with pytest.raises(NonFiniteLogits, match="row 0, position 3"):
            stepper.drain()
    finally:
        outputs.compute_logits = compute  # type: ignore[method-assign]
        stepper.close()
        runner.reset()
