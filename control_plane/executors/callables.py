"""Send a Python function to workers that run any: both ends must have opted in (``allow_insecure_serialization``)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import Message

from maniple.v1 import worker_pb2
from service_chassis.errors import PermissionDenied, WrongState

REFUSAL = (
    "a Python function is called only in process (executor uni), or where the control plane and every worker were "
    "started with --allow-insecure-serialization"
)


@dataclass(frozen=True, slots=True)
class PickledCall:
    """The same bytes for every rank."""

    request: worker_pb2.CallPickledRequest

    @staticmethod
    def result(reply: Message) -> Any:
        """Unpickle what a rank returned. Trusted as the rank itself is: the operator said so."""
        return pickle.loads(cast("worker_pb2.CallPickledResponse", reply).result)


def pickled_call(function: Callable[[Any], object], epoch: int, *, allowed: bool) -> PickledCall:
    """Pickle ``function`` by value where it has no module that workers could import.

    Raises:
        PermissionDenied: this end did not opt in.
        WrongState: cloudpickle is not installed.
    """
    if not allowed:
        raise PermissionDenied(REFUSAL)
    try:
        import cloudpickle
    except ImportError as error:
        raise WrongState("cloudpickle is not installed here: pip install 'maniple[callables]'") from error
    return PickledCall(worker_pb2.CallPickledRequest(epoch=epoch, function=cloudpickle.dumps(function)))
