"""NCCL without a device: what is set for it, what is checked, what breaks it. What it computes needs devices."""

from __future__ import annotations

import datetime
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from service_chassis.errors import InvalidParameter
from support.runner_driver import RunnerDriver
from support.thread_ranks import run_ranks
from support.tiny_checkpoints import tiny_config, write_checkpoint
from worker_service import nccl, tensor_group
from worker_service.nccl import choose_all_reduce, form_nccl, mismatch, missing_settings
from worker_service.process_group import BrokenCollective, LoneProcessGroup
from worker_service.tensor_group import TensorGroup

PAIR = LoneProcessGroup("f", rank=0, world_size=2)


def test_only_what_the_environment_does_not_say_is_set() -> None:
    assert missing_settings({}, "10.0.0.1") == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    assert missing_settings({}, "127.0.0.1")["NCCL_SOCKET_IFNAME"] == "lo"
    said = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert missing_settings(said, "127.0.0.1") == {"TORCH_NCCL_ENABLE_MONITORING": "0"}


@pytest.mark.parametrize(
    ("cuda", "compiled_for", "installed", "parts"),
    [
        ("13.0", (2, 28, 9), {"nvidia-nccl-cu13": "2.28.9"}, ()),
        ("13.0", (2, 28, 9), {"nvidia-nccl-cu13": "2.29.1", "nvidia-nccl-cu12": "2.20.5"}, ()),
        ("13.0", (2, 28, 9), {}, ()),  # torch's image brings its own
        (None, (), {"nvidia-nccl-cu12": "2.27.5"}, ()),  # no CUDA in this torch
        (
            "13.0",
            (2, 28, 9),
            {"nvidia-nccl-cu12": "2.27.5"},
            ("CUDA 13.0 and needs nvidia-nccl-cu13", "nvidia-nccl-cu12 2.27.5 is installed", "maniple[cuda13]"),
        ),
        ("12.8", (2, 27, 5), {"nvidia-nccl-cu13": "2.28.9"}, ("needs nvidia-nccl-cu12", "maniple[cuda12]")),
        ("13.0", (2, 28, 9), {"nvidia-nccl-cu13": "2.27.7"}, ("NCCL 2.28.9", "older nvidia-nccl-cu13 2.27.7")),
    ],
)
def test_an_nccl_that_does_not_fit_torch_is_named(
    cuda: str | None, compiled_for: tuple[int, ...], installed: dict[str, str], parts: tuple[str, ...]
) -> None:
    said = mismatch(cuda, compiled_for, installed)
    assert bool(said) == bool(parts)
    assert all(part in said for part in parts)


class FakeNccl:
    """A communicator that doubles what it adds up, and notes how it was asked."""

    def __init__(self, store: object = None, rank: int = 0, world_size: int = 2, options: Any = None) -> None:
        self.asked: list[Any] = []
        self.options = options
        self.connected: torch.device | None = None
        self.aborted = threading.Event()

    class Options:
        _timeout = datetime.timedelta(minutes=10)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self.asked.append(options)
        tensors[0].mul_(2)

    def abort(self) -> None:
        self.aborted.set()


def test_a_communicator_has_no_time_limit_of_its_own_and_is_connected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nccl, "installed_packages", dict)
    bound: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    device = torch.device("cuda", 1)
    backend = form_nccl(None, PAIR, device, environment)  # type: ignore[arg-type]
    assert bound == [device]
    assert backend.connected == device
    assert backend.options._timeout > datetime.timedelta(days=1000)  # an owner's watchdog is always sooner
    assert environment == {
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    monkeypatch.setattr(nccl, "installed_packages", lambda: {"nvidia-nccl-cu12": "2.27.5"})
    with pytest.raises(InvalidParameter, match="needs nvidia-nccl-cu13"):
        form_nccl(None, PAIR, device, environment)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(InvalidParameter, match="this torch has no NCCL"):
        form_nccl(None, PAIR, device, environment)  # type: ignore[arg-type]


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> tuple[TensorGroup, FakeNccl]:
    """A group on a device that is not there."""
    backend = FakeNccl()
    monkeypatch.setattr(tensor_group, "form_nccl", lambda store, group, device: backend)
    monkeypatch.setattr(tensor_group, "form_store", lambda group: None)
    group = TensorGroup(torch.device("cuda", 0))
    group.join(PAIR)
    return group, backend


def test_sums_are_taken_on_the_stream_that_computes(formed: tuple[TensorGroup, FakeNccl]) -> None:
    group, backend = formed
    assert group.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    [options] = backend.asked
    assert options.asyncOp is False
    assert options.timeout > datetime.timedelta(days=1000)


def test_an_aborted_group_gives_no_sums(formed: tuple[TensorGroup, FakeNccl]) -> None:
    group, backend = formed
    group.check()
    group.abort()
    assert backend.aborted.wait(5)
    with pytest.raises(BrokenCollective, match="aborted"):
        group.check()
    with pytest.raises(BrokenCollective, match="aborted"):
        group.all_reduce(torch.ones(3))
    assert not backend.asked
    group.join(LoneProcessGroup("next"))
    group.check()


def test_the_first_way_to_add_up_that_takes_a_group_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeNccl()
    name, _ = choose_all_reduce(backend, PAIR)
    assert name == "nccl"
    own = {"one_machine": lambda backend, group: (lambda x: None) if group.world_size == 2 else None}
    monkeypatch.setattr(nccl, "ALL_REDUCES", {**own, **nccl.ALL_REDUCES})
    assert choose_all_reduce(backend, PAIR)[0] == "one_machine"
    assert choose_all_reduce(backend, replace(PAIR, world_size=4))[0] == "nccl"


def test_a_layer_adds_up_once_for_attention_and_once_for_its_mlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2)
    directory = write_checkpoint(tmp_path / "model", config)
    all_reduce, counts = TensorGroup.all_reduce, []

    def counted(self: TensorGroup, x: Tensor) -> Tensor:
        counts.append(tuple(x.shape))
        return all_reduce(self, x)

    monkeypatch.setattr(TensorGroup, "all_reduce", counted)

    def one_step(group: Any) -> None:
        driver = RunnerDriver(directory, group=group)
        if group.rank == 0:
            counts.clear()
        group.barrier()
        driver.step({0: 3}, new=[driver.enter(0, [5, 9, 17])])

    run_ranks(2, one_step)
    # Two ranks; the embedding, and each of three layers twice.
    assert counts == [(3, config["hidden_size"])] * 2 * (1 + 2 * 3)


def test_the_operators_page_has_every_setting_with_its_value() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    for name, value in missing_settings({}, "127.0.0.1").items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        assert value in row.split("|")[2]
