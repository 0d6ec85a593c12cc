from __future__ import annotations

import grpc
import pytest
from google.rpc import status_pb2

from control_plane.executors.rpc_errors import error_of_call, error_of_status
from service_chassis import errors


def rows() -> list[type[errors.ManipleError]]:
    classes = [row for row in vars(errors).values() if isinstance(row, type) and issubclass(row, errors.ManipleError)]
    return [row for row in classes if row not in (errors.ManipleError, errors.InvalidParameter, errors.InternalError)]


SENTENCES = rows()


@pytest.mark.parametrize("row", SENTENCES, ids=lambda row: row.__name__)
def test_every_row_of_the_table_comes_back_as_its_class(row: type[errors.ManipleError]) -> None:
    sent = row("why", metadata={"expected_step": "7"}, retry_after_s=1.5)
    back = error_of_status(status_pb2.Status.FromString(sent.status().SerializeToString()))
    assert type(back) is row
    assert (back.message, back.metadata, back.retry_after_s) == ("why", {"expected_step": "7"}, 1.5)


def test_invalid_parameter_comes_back_with_field_and_rule() -> None:
    back = error_of_status(errors.InvalidParameter("dtype", "int3", "must be one of: auto, float32").status())
    assert isinstance(back, errors.InvalidParameter)
    assert (back.field, back.rule) == ("dtype", "must be one of: auto, float32")
    assert str(back) == "dtype='int3': must be one of: auto, float32"


def test_internal_error_keeps_its_incident() -> None:
    sent = errors.InternalError()
    back = error_of_status(sent.status())
    assert isinstance(back, errors.InternalError)
    assert back.incident_id == sent.incident_id
    assert back.status() == sent.status()


def rpc_error(code: grpc.StatusCode, status: status_pb2.Status | None = None) -> grpc.aio.AioRpcError:
    trailers = [("grpc-status-details-bin", status.SerializeToString())] if status else []
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details="details")


def test_status_without_our_details_is_transport_loss_whatever_its_code() -> None:
    # INTERNAL is how a proxy shows a killed server.
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        error = error_of_call(rpc_error(code))
        assert isinstance(error, ConnectionError)
        assert str(error) == f"{code.name}: details"
    foreign = status_pb2.Status(code=9, message="from a proxy")
    assert isinstance(error_of_call(rpc_error(grpc.StatusCode.FAILED_PRECONDITION, foreign)), ConnectionError)


def test_silence_is_a_timeout() -> None:
    assert isinstance(error_of_call(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED)), TimeoutError)


def test_refusal_is_read_from_the_trailers() -> None:
    error = error_of_call(rpc_error(grpc.StatusCode.FAILED_PRECONDITION, errors.Fenced("epoch 3").status()))
    assert isinstance(error, errors.Fenced)
