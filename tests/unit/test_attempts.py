"""What the Python programs do about errors that their client leaves to them: the table of docs/clients.md."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from maniple_client import (
    Aborted,
    AlreadyExists,
    DataLoss,
    ManipleError,
    NotFound,
    Overloaded,
    TransportLost,
    Unavailable,
)

ROOT = Path(__file__).resolve().parents[2]
UNAVAILABLE, ABORTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED
LOST = TransportLost(UNAVAILABLE, "reset")
TAKEN = AlreadyExists(grpc.StatusCode.ALREADY_EXISTS, "running", reason="DUPLICATE_REQUEST")


def attempts(starts_over: int = 1) -> Any:
    spec = importlib.util.spec_from_file_location("python_attempts", ROOT / "clients/python/examples/attempts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their own annotations
    spec.loader.exec_module(module)
    return module.Attempts(request_id="mine", retry_for_s=30.0, starts_over=starts_over)


@pytest.mark.parametrize(
    ("error", "begun", "what"),
    [
        (LOST, False, "sending_again"),
        (Unavailable(UNAVAILABLE, "loading", reason="NOT_READY"), False, "sending_again"),
        (Overloaded(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL"), False, "sending_again"),
        (Aborted(ABORTED, "elsewhere", reason="TAKEN_OVER"), False, "starting_over"),
        (Aborted(ABORTED, "lost", reason="GROUP_LOST"), False, "starting_over"),
        (Aborted(ABORTED, "lost", reason="GROUP_LOST"), True, "starting_over"),
        (DataLoss(grpc.StatusCode.DATA_LOSS, "beyond", reason="RESUME_LOST"), True, "starting_over"),
        (NotFound(grpc.StatusCode.NOT_FOUND, "who?", reason="UNKNOWN_REQUEST"), True, "starting_over"),
        (Aborted(ABORTED, "another stream", reason="SUPERSEDED"), True, None),
        (TAKEN, False, None),
    ],
)
def test_what_follows_an_error_is_what_the_table_says(error: ManipleError, begun: bool, what: str | None) -> None:
    one = attempts()
    again = one.after(error, 0.0, begun=begun)
    assert (again.what if again else None) == what
    assert (one.request_id == "mine") == (what != "starting_over")


@pytest.mark.parametrize("starts_over", [0, 1])
def test_request_that_was_admitted_unheard_is_asked_under_a_new_id_where_the_user_allows_it(starts_over: int) -> None:
    one = attempts(starts_over)
    assert one.after(LOST, 0.0, begun=False).request_id == "mine"
    again = one.after(TAKEN, 0.1, begun=False)
    assert (again is not None) == bool(starts_over)
    if again is not None:
        assert again.request_id != "mine"
        assert one.after(TAKEN, 0.2, begun=False) is None, "nobody sent this one before"
