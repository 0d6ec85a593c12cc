"""Turn the status of a failed call back into the class of the one table that the rank raised."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2

from maniple.v1 import errors_pb2
from service_chassis import errors

_DETAILS_KEY = "grpc-status-details-bin"


# The rows of the table: the classes of that module alone, not what others make of them. A reason can travel with two
# codes (GROUP_LOST), a code with many reasons: both together name the class.
_TABLE = {
    (row.code, row.reason): row
    for row in vars(errors).values()
    if isinstance(row, type) and issubclass(row, errors.ManipleError) and row is not errors.ManipleError
}


def error_of_call(error: grpc.aio.AioRpcError) -> errors.ManipleError | ConnectionError | TimeoutError:
    """Return what a failed call means: a refusal from the table, silence, or transport loss.

    Whatever does not carry our own details is transport loss. Behind a proxy a killed server shows as INTERNAL with
    RST_STREAM rather than UNAVAILABLE, so the code alone says little.
    """
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            refusal = error_of_status(status_pb2.Status.FromString(value))
            if refusal is not None:
                return refusal
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimeoutError(error.details() or "deadline exceeded")
    return ConnectionError(f"{error.code().name}: {error.details()}")


def error_of_status(status: status_pb2.Status) -> errors.ManipleError | None:
    """Rebuild the error that ``ManipleError.status`` described; None if the status is not one of ours."""
    info = error_details_pb2.ErrorInfo()
    if not any(detail.Unpack(info) for detail in status.details) or info.domain != errors.DOMAIN:
        return None
    name = f"ERROR_REASON_{info.reason}"
    reason = errors_pb2.ErrorReason.Value(name) if name in errors_pb2.ErrorReason.keys() else None  # noqa: SIM118
    cls = _TABLE.get((status.code, reason), errors.InternalError) if reason is not None else errors.InternalError
    error = cls.__new__(cls)
    errors.ManipleError.__init__(error, status.message, metadata=info.metadata)
    error.incident_id = error.metadata.pop("incident_id", "")
    for detail in status.details:
        retry, bad = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(retry):
            error.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
        elif detail.Unpack(bad) and isinstance(error, errors.InvalidParameter) and bad.field_violations:
            error.field = bad.field_violations[0].field
            error.rule = error.message.split(": ", 1)[-1]
    return error
