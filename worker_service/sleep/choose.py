"""Pick the sleep backend: by the device, by name, or one that somebody else installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch

from service_chassis.errors import InvalidParameter
from service_chassis.telemetry import get_logger
from worker_service.sleep.backend import SleepBackend
from worker_service.sleep.memory_saver import MemorySaverBackend
from worker_service.sleep.pages import PagesBackend


@dataclass(frozen=True, slots=True)
class SleepOptions:
    """How a worker that may sleep does it: its flags --sleep-backend and --sleep-directory."""

    backend: str = "auto"
    directory: str = ""


# Takes the device and the directory of --sleep-directory (empty: the backend's choice).
MakeBackend = Callable[[torch.device, str], SleepBackend]

# A package that brings a backend names a MakeBackend under this group of entry points; --sleep-backend takes the name.
ENTRY_POINTS = "maniple.sleep_backends"

_registered: dict[str, MakeBackend] = {}


def register(name: str, make: MakeBackend) -> None:
    """Offer a backend under a name, in this process. For workers in processes of their own there are entry points."""
    _registered[name] = make


def choose_backend(name: str, device: torch.device, directory: str = "") -> SleepBackend:
    """Return the backend of that name; "auto" is the one for the device.

    Raises:
        InvalidParameter: there is none of that name, it cannot be loaded, or it is not for this device.
    """
    known = {**_built_in(), **_installed(), **_registered}
    if name == "auto":
        name = "pages" if device.type == "cpu" else "torch-memory-saver"
    if name not in known:
        raise InvalidParameter("sleep_backend", name, f"must be auto or one of {', '.join(sorted(known))}")
    try:
        backend = known[name](device, directory)
    except InvalidParameter:
        raise
    except Exception as error:  # somebody else's code
        rule = f"cannot be used here: {type(error).__name__}: {error}"
        raise InvalidParameter("sleep_backend", name, rule) from error
    able = backend.capabilities
    get_logger().info(
        "sleep_backend.chosen",
        backend=backend.name,
        preserves_communicators=able.preserves_communicators,
        preserves_graphs=able.preserves_graphs,
        durable=able.durable,
    )
    return backend


def _built_in() -> dict[str, MakeBackend]:
    def pages(device: torch.device, directory: str) -> SleepBackend:
        _check_device("pages", device, "cpu")
        return PagesBackend(directory)

    def memory_saver(device: torch.device, directory: str) -> SleepBackend:
        _check_device("torch-memory-saver", device, "cuda")
        return MemorySaverBackend()

    return {"pages": pages, "torch-memory-saver": memory_saver}


def _check_device(name: str, device: torch.device, wanted: str) -> None:
    if device.type != wanted:
        raise InvalidParameter("sleep_backend", name, f"is for the device {wanted}, and this is {device.type}")


def _installed() -> dict[str, MakeBackend]:
    def later(entry: importlib.metadata.EntryPoint) -> MakeBackend:
        return lambda device, directory: entry.load()(device, directory)

    return {entry.name: later(entry) for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
