"""Turn a failed call into an exception that says what to do about it.

The server's statuses carry google.rpc details: a reason of the one table (ErrorInfo), when to come again (RetryInfo),
which field broke which rule (BadRequest). Streams repeat the error in band, since transcoders lose trailers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from maniple.v1 import errors_pb2

DOMAIN = "maniple.dev"
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One broken rule of a request."""

    field: str
    description: str


class ManipleError(Exception):
    """A call or a stream ended badly.

    Attributes:
        code: the gRPC status code.
        reason: name in the table of reasons, such as "QUEUE_FULL"; empty where the error is not the server's own.
        message: for people.
        retry_after_s: when to come again, where the server said so.
        field_violations: what was wrong with the request.
        incident_id: the key under which the server logged a defect.
        metadata: more facts about the reason, such as "owner_address".
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.field_violations = field_violations
        self.metadata = metadata or {}

    @property
    def incident_id(self) -> str:
        return self.metadata.get("incident_id", "")

    @property
    def may_retry(self) -> bool:
        """Whether the request provably did not start, so that sending it again cannot run it twice."""
        return bool(self.reason) and self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class InvalidArgument(ManipleError):
    """The request breaks a rule; see ``field_violations``."""


class NotFound(ManipleError):
    """No such model, adapter or request."""


class AlreadyExists(ManipleError):
    """The request id is running, or finished less than a minute ago."""


class Overloaded(ManipleError):
    """The queue is full; come again after ``retry_after_s``."""


class Unavailable(ManipleError):
    """Loading, draining, asleep, or the group was lost before the request started."""


class Aborted(ManipleError):
    """The request ended half-way: its group was lost, or another server or stream took it over."""


class DataLoss(ManipleError):
    """What was to be resumed did not survive."""


class DeadlineExceeded(ManipleError):
    """The deadline passed; the server freed what the request held."""


class Cancelled(ManipleError):
    """The call was cancelled."""


class WrongState(ManipleError):
    """The call does not fit the server's present state."""


class NotBuilt(ManipleError):
    """The server does not have this call."""


class Unauthenticated(ManipleError):
    """No credentials, or unknown ones."""


class PermissionDenied(ManipleError):
    """The credentials do not cover this call."""


class InternalError(ManipleError):
    """A defect of the server; quote ``incident_id``."""


class TransportLost(ManipleError):
    """The connection broke, or nobody listens. Whether the request ran is unknown.

    From a stream that had begun it means that there is nothing to resume, or nobody had it in time: start over.
    """


_CLASSES: dict[grpc.StatusCode, type[ManipleError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.UNIMPLEMENTED: NotBuilt,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.INTERNAL: InternalError,
}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def _class_of(code: grpc.StatusCode, reason: str) -> type[ManipleError]:
    # Without one of our reasons these two come from a proxy or from gRPC itself. Behind a proxy a killed server shows
    # as INTERNAL ("RST_STREAM"), not as UNAVAILABLE: both mean the same.
    if not reason and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
        return TransportLost
    return _CLASSES.get(code, ManipleError)


def from_rpc_error(error: grpc.RpcError) -> ManipleError:
    """Return the exception for a failed call, sync or async."""
    # grpc's stubs give RpcError no methods, though every error of a call has them.
    call: Any = error
    return from_status(call.code(), call.details() or "", call.trailing_metadata() or ())


def from_status(
    code: grpc.StatusCode, message: str, trailing_metadata: Iterable[tuple[str, str | bytes]]
) -> ManipleError:
    """Return the exception for a status and its trailers."""
    reason, retry_after_s, violations, metadata = "", None, [], {}
    for key, value in trailing_metadata:
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after_s = delay.seconds + delay.nanos / 1e9
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                violations += [
                    FieldViolation(one.field, one.description)
                    for one in error_details_pb2.BadRequest.FromString(detail.value).field_violations
                ]
    return _class_of(code, reason)(
        code,
        message,
        reason=reason,
        retry_after_s=retry_after_s,
        field_violations=tuple(violations),
        metadata=metadata,
    )


def richer(in_band: ManipleError | None, status: ManipleError) -> ManipleError:
    """Prefer the status, which has all details, unless something on the way replaced it."""
    return in_band if in_band is not None and in_band.reason != status.reason else status


def from_stream_error(error: errors_pb2.StreamError) -> ManipleError:
    """Return the exception for the in-band form of an error."""
    code = _BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
    reason = ""
    if error.reason in errors_pb2.ErrorReason.values():
        reason = errors_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
    metadata = {"incident_id": error.incident_id, "owner_address": error.owner_address}
    return _class_of(code, reason)(
        code, error.message, reason=reason, metadata={key: value for key, value in metadata.items() if value}
    )
