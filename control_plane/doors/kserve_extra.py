"""Serve KServe's protocol where its stubs are installed, and say in one sentence where they are not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from control_plane.doors.served_model import ServedModel
from service_chassis.telemetry import get_logger

if TYPE_CHECKING:
    from control_plane.fleet import Fleet

log = get_logger()

SERVICE = "inference.GRPCInferenceService"
# Each control plane says this of itself; whether others are alive is no answer.
ANSWERED_HERE = (f"/{SERVICE}/ServerLive",)
_MISSING = "needs the package tritonclient: pip install 'maniple[kserve]'"


def is_installed() -> bool:
    """Whether the door can be opened."""
    return importlib.util.find_spec("tritonclient") is not None


def sentence() -> str:
    """Say for a help text whether the door is there."""
    if is_installed():
        return f"KServe clients are served too, as {SERVICE}."
    return f"KServe clients are not served: {SERVICE} {_MISSING}."


def open_door(
    server: grpc.aio.Server, fleet: Fleet, served: ServedModel, *, version: str, new_seed: Callable[[], int]
) -> tuple[str, ...]:
    """Add the service to ``server`` if it can be; return the names of the services that were added."""
    if not is_installed():
        log.info("door.absent", service=SERVICE, reason=_MISSING)
        return ()
    from tritonclient.grpc import service_pb2_grpc

    from control_plane.doors.open_inference import OpenInferenceDoor

    door = OpenInferenceDoor(fleet, served, version=version, new_seed=new_seed)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(door, server)
    return (SERVICE,)
