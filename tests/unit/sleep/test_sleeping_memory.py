"""What a runner's memory does between sleep and wake, on backends that say what they were asked."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from service_chassis.errors import InvalidParameter, WrongState
from worker_service.platforms.base import MemoryReading
from worker_service.sleep import choose
from worker_service.sleep.backend import Capabilities
from worker_service.sleep.memory_saver import MemorySaverBackend
from worker_service.sleep.pages import PagesBackend
from worker_service.sleep.sleeping_memory import SleepingMemory

CPU = torch.device("cpu")
GIB = 1 << 30


def platform(available: int = GIB) -> Any:
    reading = MemoryReading(total=2 * GIB, available=available, own=0)
    return SimpleNamespace(device=CPU, memory=lambda: reading)


class Model:
    config = None
    weight_bytes = 40_000

    def __init__(self) -> None:
        self.weight = torch.ones(100, 100)
        self.buffer = torch.full((5000,), 3.0)


class Cache:
    def __init__(self) -> None:
        self.layers = [torch.ones(2, 5000), [torch.ones(5000), torch.ones(5000)]]  # a tensor, and a list of states
        self.scales = torch.full((3,), 7.0)


class Reading:
    """A renewal whose source holds fives."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.is_gone = is_gone
        self.paths: list[str] = []

    def without_source(self, model: Any) -> list[Tensor]:
        return [model.buffer]

    def stage(self, path: str, model: Any, progress: Any) -> Any:
        self.paths.append(path)
        if self.is_gone:
            raise InvalidParameter("model", path, "must be there")
        return lambda: model.weight.fill_(5.0)


def ignore(share: float, what: str) -> None:
    pass


def memory(backend: Any, renewal: Any = None, **of_platform: Any) -> SleepingMemory:
    made = SleepingMemory(platform(**of_platform), backend, renewal or Reading())
    made.began("/source")
    return made


def test_level_1_keeps_weights_and_level_2_reads_them_again_and_keeps_buffers() -> None:
    model, cache = Model(), Cache()
    renewal = Reading()
    sleeping = memory(PagesBackend(), renewal)
    for level, weight in ((1, 1.0), (2, 5.0)):
        sleeping.sleep(level, model, cache, world_size=2)
        assert sleeping.asleep == {"weights", "kv_cache"}
        assert sleeping.sleep(level, model, cache, world_size=2) == 0
        sleeping.wake_up(["kv_cache"], model, ignore)
        assert sleeping.asleep == {"weights"}
        for _ in range(2):
            sleeping.wake_up(["weights", "kv_cache"], model, ignore)
        assert not sleeping.asleep
        assert torch.equal(model.weight, torch.full((100, 100), weight))
        assert torch.equal(model.buffer, torch.full((5000,), 3.0))
    assert renewal.paths == ["/source"]


def test_everything_of_a_cache_wakes_as_zeros_be_it_a_tensor_or_a_list() -> None:
    model, cache = Model(), Cache()
    sleeping = memory(PagesBackend())
    sleeping.sleep(1, model, cache, world_size=1)
    sleeping.wake_up(["kv_cache"], model, ignore)
    for tensor in (cache.layers[0], *cache.layers[1], cache.scales):
        assert not tensor.any()
    assert cache.scales.shape == (3,)


def test_going_deeper_forgets_what_was_kept() -> None:
    model, renewal = Model(), Reading()
    sleeping = memory(PagesBackend(), renewal)
    sleeping.sleep(1, model, Cache(), world_size=1)
    assert sleeping.sleep(2, model, Cache(), world_size=1) == 0
    sleeping.wake_up(["weights"], model, ignore)
    assert renewal.paths == ["/source"]
    assert torch.equal(model.weight, torch.full((100, 100), 5.0))


def test_memory_that_is_not_there_any_more_leaves_all_asleep() -> None:
    model, cache = Model(), Cache()
    sleeping = memory(PagesBackend(), available=1000)
    sleeping.sleep(1, model, cache, world_size=1)
    for tags, what in ((["weights"], "weights"), (["weights", "kv_cache"], "weights and kv_cache")):
        with pytest.raises(WrongState, match=f"are needed to wake {what}, and 0 MiB are available"):
            sleeping.wake_up(tags, model, ignore)
    assert sleeping.asleep == {"weights", "kv_cache"}
    sleeping._platform = platform()  # somebody gave it back
    sleeping.wake_up(["weights", "kv_cache"], model, ignore)
    assert torch.equal(model.weight, torch.ones(100, 100))


def test_source_that_is_gone_leaves_weights_asleep() -> None:
    model, renewal = Model(), Reading(is_gone=True)
    sleeping = memory(PagesBackend(), renewal)
    sleeping.sleep(2, model, Cache(), world_size=1)
    with pytest.raises(WrongState, match="the weights cannot be read again: model='/source': must be there"):
        sleeping.wake_up(["weights", "kv_cache"], model, ignore)
    assert sleeping.asleep == {"weights", "kv_cache"}
    renewal.is_gone = False
    sleeping.wake_up(["weights"], model, ignore)
    assert torch.equal(model.weight, torch.full((100, 100), 5.0))


def test_worker_that_was_not_started_for_it_refuses() -> None:
    with pytest.raises(WrongState, match="not started with --enable-sleep-mode"):
        memory(None).sleep(1, Model(), Cache(), world_size=1)
    assert not memory(None).wake_up(["weights"], Model(), ignore)


class Backend(PagesBackend):
    name = "other"
    capabilities = Capabilities(preserves_communicators=False, preserves_graphs=False, durable=True)


def test_what_a_backend_does_not_preserve_is_done_without() -> None:
    model, cache = Model(), Cache()
    with pytest.raises(WrongState, match="the sleep backend other would break the connection between 2 ranks"):
        memory(Backend()).sleep(1, model, cache, world_size=2)
    alone = memory(Backend())
    alone.sleep(1, model, cache, world_size=1)
    assert not alone.wake_up(["weights"], model, ignore)
    assert alone.wake_up(["kv_cache"], model, ignore)  # now graphs have to be captured again
    assert not memory(PagesBackend()).wake_up([], model, ignore)


def test_backends_are_chosen_by_device_or_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose.choose_backend("auto", CPU), PagesBackend)
    entry = importlib.metadata.EntryPoint("installed", f"{__name__}:make", choose.ENTRY_POINTS)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [entry] if group == choose.ENTRY_POINTS else []
    )
    monkeypatch.setattr(
        importlib.metadata.EntryPoint, "load", lambda self: lambda device, directory: Backend(directory)
    )
    assert isinstance(choose.choose_backend("installed", CPU), Backend)
    choose.register("registered", lambda device, directory: Backend(directory))
    monkeypatch.setitem(choose._registered, "registered", choose._registered["registered"])
    assert isinstance(choose.choose_backend("registered", CPU), Backend)
    with pytest.raises(InvalidParameter, match="must be auto or one of installed, pages, registered, torch-memory"):
        choose.choose_backend("nothing", CPU)
    with pytest.raises(InvalidParameter, match="is for the device cpu, and this is cuda"):
        choose.choose_backend("pages", torch.device("cuda"))
    choose.register("broken", lambda device, directory: Backend(directory / 1))  # type: ignore[operator]
    with pytest.raises(InvalidParameter, match="sleep_backend='broken': cannot be used here: TypeError"):
        choose.choose_backend("broken", CPU)
    del choose._registered["registered"], choose._registered["broken"]


def test_cuda_backend_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(InvalidParameter, match=r"needs the library torch-memory-saver: install maniple\[sleep\]"):
        choose.choose_backend("auto", torch.device("cuda"))


class Saver:
    """What torch_memory_saver documents: regions by tag, whose contents are undefined after a pause."""

    def __init__(self) -> None:
        self.hook_mode = "preload"
        self.said: list[str] = []
        self.regions: dict[str, list[Tensor]] = {}

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        self.said.append(f"region {tag} {self.hook_mode}")
        yield

    def pause(self, tag: str) -> None:
        self.said.append(f"pause {tag}")
        for tensor in self.regions[tag]:
            tensor.fill_(float("nan"))

    def resume(self, tag: str) -> None:
        self.said.append(f"resume {tag}")


def test_memory_saver_pauses_by_tag_and_restores_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, module = Saver(), ModuleType("torch_memory_saver")
    module.torch_memory_saver = saver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    backend = MemorySaverBackend()
    sleeping = memory(backend)
    with sleeping.region("weights"):
        model = Model()
    with sleeping.region("kv_cache"):
        cache = Cache()
    saver.regions = {
        "weights": [model.weight, model.buffer],
        "kv_cache": [cache.layers[0], *cache.layers[1], cache.scales],
    }
    freed = sleeping.sleep(2, model, cache, world_size=4)
    assert freed == 4 * (10_000 + 5_000 + 10_000 + 2 * 5_000 + 3)
    sleeping.wake_up(["weights"], model, ignore)
    assert torch.equal(model.weight, torch.full((100, 100), 5.0))
    assert torch.equal(model.buffer, torch.full((5000,), 3.0))
    sleeping.wake_up(["kv_cache"], model, ignore)
    for tensor in saver.regions["kv_cache"]:
        assert torch.equal(tensor, torch.zeros_like(tensor))
    assert saver.said == [
        "region weights torch",
        "region kv_cache torch",
        *(f"pause {tag}" for tag in ("weights", "kv_cache")),
        *(f"resume {tag}" for tag in ("weights", "kv_cache")),
    ]


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes((9000).to_bytes(8, "little") + b"[" * 9000), "cannot be read: JSON nested"),
    ],
    ids=["directory", "nested"],
)
def test_checkpoint_that_cannot_be_read_is_refused_and_is_no_failure_of_the_rank(
    tmp_path: Path, make: Callable[[Path], object], rule: str
) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(InvalidParameter, match=rule):
        memory(PagesBackend()).stage(str(tmp_path), Model(), ignore)  # type: ignore[arg-type]


def test_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="cannot be read: File name too long"):
        memory(PagesBackend()).stage("/" + "a" * 5000, Model(), ignore)  # type: ignore[arg-type]
