"""Run a function that travelled as bytes. Only for workers whose operator allowed that: it can do anything here."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from service_chassis.errors import InternalError, InvalidParameter, PermissionDenied, WrongState
from service_chassis.telemetry import get_logger

REFUSAL = "this worker runs no pickled functions: it was started without --allow-insecure-serialization"


def check_allowed(allowed: bool) -> None:
    """Raise ``PermissionDenied`` where the operator did not opt in."""
    if not allowed:
        raise PermissionDenied(REFUSAL)


def load_function(pickled: bytes) -> Callable[[Any], object]:
    """Unpickle what the owner sent. The bytes are trusted, because the operator said so."""
    try:
        import cloudpickle
    except ImportError as error:
        raise WrongState("cloudpickle is not installed here: pip install 'maniple[callables]'") from error
    try:
        function = cloudpickle.loads(pickled)
    except Exception as error:  # anything can go wrong inside, a missing module most of all
        raise InvalidParameter("function", "", f"cannot be unpickled: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise InvalidParameter("function", type(function).__name__, "must be a callable")
    found: Callable[[Any], object] = function
    return found


def run(function: Callable[[Any], object], rank: object) -> bytes:
    """Call the function and pickle what it returns. Its own failure goes to the owner in words, and fails no rank."""
    try:
        return pickle.dumps(function(rank), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        crash = InternalError()
        get_logger().error("pickled_call.failed", incident_id=crash.incident_id, exc_info=error)
        crash.message = f"{type(error).__name__}: {error} (incident {crash.incident_id})"
        raise crash from error
