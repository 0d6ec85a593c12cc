"""Give a model other weights, in two steps: what can go wrong does so in the first, which changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from service_chassis.errors import InvalidParameter
from worker_service.models.checkpoint import Slot, check_checkpoint, load_checkpoint, stored_types
from worker_service.models.config import LlamaConfig, load_config
from worker_service.models.registry import Model
from worker_service.runner import Progress
from worker_service.sleep.pages import trim_heap
from worker_service.sleep.tensors import memory_of, tensors_in

_CHECKED_AT_ONCE = 1 << 24


class Renewal(Protocol):
    """A way to other weights. Which one depends on whether they may lie elsewhere than the present ones."""

    def without_source(self, model: Model) -> list[Tensor]:
        """Return the tensors that a sleep has to keep although all weights are read again when they wake."""

    def stage(self, path: str, model: Model, progress: Progress) -> Callable[[], None]:
        """Read new weights beside the present ones; return what puts them in their place.

        Raises:
            InvalidParameter: the checkpoint is not one of this model.
        """


class Anew:
    """Where nothing depends on addresses: a second model is loaded, and the first becomes what it is."""

    def __init__(self, load: Callable[[str, Progress], Model]) -> None:
        """Load a model directory by ``load``."""
        self._load = load

    def without_source(self, model: Model) -> list[Tensor]:
        return []  # buffers are made with the model

    def stage(self, path: str, model: Model, progress: Progress) -> Callable[[], None]:
        if isinstance(model.config, LlamaConfig) and (config := load_config(Path(path))) != model.config:
            raise InvalidParameter("path", path, different_config(model.config, config))  # before it takes memory
        fresh = self._load(path, progress)
        if fresh.config != model.config:
            raise InvalidParameter("path", path, different_config(model.config, fresh.config))
        check_finite(path, tensors_in(fresh))

        def put() -> None:
            # Whoever holds the model holds it still.
            vars(model).clear()
            vars(model).update(vars(fresh))
            trim_heap()

        return put


class InPlace:
    """Where addresses must stay, since captured graphs know them: read to the host, then copied over."""

    def without_source(self, model: Model) -> list[Tensor]:
        filled = {memory_of(slot.target) for slot in _slots(model).values()}
        return [tensor for tensor in tensors_in(model) if memory_of(tensor) not in filled]

    def stage(self, path: str, model: Model, progress: Progress) -> Callable[[], None]:
        directory = Path(path)
        if not directory.is_dir():
            raise InvalidParameter("path", path, "must be a directory where the workers run")
        slots, ignored = _slots(model), getattr(model, "ignores", lambda name: False)
        if (config := model.read_config(directory)) != model.config:
            raise InvalidParameter("path", path, different_config(model.config, config))
        check_checkpoint(directory, slots, ignored=ignored)
        on_host = {
            name: dataclasses.replace(slot, target=torch.empty(slot.target.shape, dtype=slot.target.dtype))
            for name, slot in slots.items()
        }
        load_checkpoint(directory, on_host, ignored=ignored, progress=progress)
        check_finite(path, [slot.target for slot in on_host.values()])

        def put() -> None:
            for name, slot in on_host.items():
                slots[name].target.copy_(slot.target)

        return put


def check_types(path: str, source: str) -> int:
    """Check that a checkpoint stores every tensor as the present one does, before any is read; return their number.

    Args:
        path: the model directory.
        source: of the present weights. Where it is gone, whatever can be read is taken.

    Raises:
        InvalidParameter: a tensor has another type, or the directory holds no checkpoint.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise InvalidParameter("path", path, "must be a directory where the workers run")
    types = stored_types(directory)
    try:
        present = stored_types(Path(source))
    except (InvalidParameter, OSError):
        present = {}
    for name, kind in types.items():
        if kind != present.get(name, kind):
            raise InvalidParameter("path", path, f"tensor {name} must be of type {present[name]}, not {kind}")
    return len(types)


def check_finite(path: str, tensors: Iterable[Tensor]) -> None:
    """Refuse weights that would make every request lose the group, and could not be replaced any more.

    Raises:
        InvalidParameter: some number is infinite or none.
    """
    for tensor in tensors:
        if tensor.is_floating_point() and not tensor.is_mkldnn:
            # In parts: the answer takes a byte for each number.
            parts = torch.split(tensor.detach().flatten(), _CHECKED_AT_ONCE)
            if not all(bool(part.isfinite().all()) for part in parts):
                raise InvalidParameter("path", path, "must hold finite numbers alone; some weight is infinite or NaN")


def different_config(present: object, new: object) -> str:
    """Say in which field of config.json a checkpoint differs from the model that is served."""
    ours, theirs = _fields(present), _fields(new)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            difference = f"{name} is {theirs.get(name)!r}, not {ours.get(name)!r}"
            return f"must have the config.json of the model that is served; {difference}"
    return "must have the config.json of the model that is served"


def _fields(config: object) -> Mapping[str, Any]:
    if hasattr(config, "__dict__"):
        return vars(config)
    return {name: getattr(config, name) for name in getattr(type(config), "__slots__", ())}


def _slots(model: Model) -> Mapping[str, Slot]:
    slots: Callable[[], Mapping[str, Slot]] | None = getattr(model, "slots", None)
    if slots is None:
        raise InvalidParameter("path", "", f"the weights of a {type(model).__name__} cannot be replaced on this device")
    return slots()
