"""Say why a call failed: one table for both services, one class a row.

Raise a class from here; the interceptors turn it into a gRPC status with google.rpc details, and streams into an
in-band ``StreamError``. Any other exception becomes INTERNAL with an incident id: its text never reaches a client.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from maniple.v1 import errors_pb2

DOMAIN = "maniple.dev"
# Of the in-band form. In the trailers there is less room.
MAX_MESSAGE_BYTES = 2048
# grpc's soft limit for all metadata is 8 KiB, and proxies are stricter: 4 KiB, less what they and grpc add themselves.
MAX_TRAILER_BYTES = 4096 - 384
# Names of fields may be a client's too: the keys of a JSON object, the names of tensors.
_MAX_FIELD_BYTES = 128
_SHORTEST_MESSAGE_BYTES = 128


def clip(text: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """Shorten ``text`` to ``max_bytes`` of UTF-8, at least 3, with an ellipsis where something was cut."""
    raw = text.encode("utf-8", "replace")
    return raw.decode() if len(raw) <= max_bytes else raw[: max_bytes - 3].decode("utf-8", "ignore") + "…"


class ManipleError(Exception):
    """A failure that a client or an owner may be told about."""

    code: int = code_pb2.INTERNAL
    reason: errors_pb2.ErrorReason.ValueType = errors_pb2.ERROR_REASON_INTERNAL

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = clip(message)
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.incident_id = ""

    def status(self) -> status_pb2.Status:
        """Return the status that travels to the caller, with its details."""
        details: list[any_pb2.Any] = []
        info = error_details_pb2.ErrorInfo(reason=reason_name(self.reason), domain=DOMAIN)
        for key, value in self.metadata.items():
            info.metadata[key] = clip(value, 256)
        if self.incident_id:
            info.metadata["incident_id"] = self.incident_id
        details.append(_pack(info))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(int(self.retry_after_s * 1000))
            details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        details += self._more_details()
        return _fitting(status_pb2.Status(code=self.code, message=self.message, details=details))

    def stream_error(self) -> errors_pb2.StreamError:
        """Return the in-band form, the last message of a stream."""
        return errors_pb2.StreamError(
            code=self.code,
            reason=self.reason,
            message=self.message,
            incident_id=self.incident_id,
            owner_address=self.metadata.get("owner_address", ""),
        )

    def _more_details(self) -> list[any_pb2.Any]:
        return []


def trailer_bytes(status: status_pb2.Status) -> int:
    """Return what a status takes on the wire: the message percent-encoded, and once more in the details, in base64."""
    escaped = sum(3 if byte < 0x20 or byte > 0x7E or byte == 0x25 else 1 for byte in status.message.encode())
    return escaped + (int(status.ByteSize()) + 2) // 3 * 4


def _fitting(status: status_pb2.Status) -> status_pb2.Status:
    """Shorten the message until the trailers have room for the status, then leave out details, the reason as the last.

    Ends whatever comes: this runs on the event loop, and some of what is in an error was said by a client.
    """
    while (size := len(status.message.encode())) > _SHORTEST_MESSAGE_BYTES and trailer_bytes(
        status
    ) > MAX_TRAILER_BYTES:
        status.message = clip(status.message, max(size * 3 // 4, _SHORTEST_MESSAGE_BYTES))
    while status.details and trailer_bytes(status) > MAX_TRAILER_BYTES:
        del status.details[-1]
    return status


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def reason_name(reason: errors_pb2.ErrorReason.ValueType) -> str:
    """Return the reason as ErrorInfo carries it: the enum name without its prefix."""
    return errors_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


class InvalidParameter(ManipleError):
    """A field breaks a rule."""

    code = code_pb2.INVALID_ARGUMENT
    reason = errors_pb2.ERROR_REASON_INVALID_PARAMETER

    def __init__(self, field: str, value: object, rule: str) -> None:
        """Name the field, the value as the client gave it, and the rule as a phrase: "must be at least 1"."""
        self.field = clip(field, _MAX_FIELD_BYTES)
        self.value = value
        self.rule = rule
        super().__init__(f"{self.field}={clip(repr(value), 120)}: {rule}")

    def _more_details(self) -> list[any_pb2.Any]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=clip(self.message, 512))
        return [_pack(error_details_pb2.BadRequest(field_violations=[violation]))]


class UnknownModel(ManipleError):
    code = code_pb2.NOT_FOUND
    reason = errors_pb2.ERROR_REASON_UNKNOWN_MODEL


class UnknownLora(ManipleError):
    code = code_pb2.NOT_FOUND
    reason = errors_pb2.ERROR_REASON_UNKNOWN_LORA


class UnknownRequest(ManipleError):
    code = code_pb2.NOT_FOUND
    reason = errors_pb2.ERROR_REASON_UNKNOWN_REQUEST


class DuplicateRequest(ManipleError):
    code = code_pb2.ALREADY_EXISTS
    reason = errors_pb2.ERROR_REASON_DUPLICATE_REQUEST


class QueueFull(ManipleError):
    code = code_pb2.RESOURCE_EXHAUSTED
    reason = errors_pb2.ERROR_REASON_QUEUE_FULL


class NotReady(ManipleError):
    """Loading, forming, draining or asleep: provably not started, a retry may help."""

    code = code_pb2.UNAVAILABLE
    reason = errors_pb2.ERROR_REASON_NOT_READY


class GroupLostBeforeStart(ManipleError):
    """The group was lost; the request was never in a delta."""

    code = code_pb2.UNAVAILABLE
    reason = errors_pb2.ERROR_REASON_GROUP_LOST


class GroupLost(ManipleError):
    """The group was lost; the request was in a delta: start over."""

    code = code_pb2.ABORTED
    reason = errors_pb2.ERROR_REASON_GROUP_LOST


class TakenOver(ManipleError):
    code = code_pb2.ABORTED
    reason = errors_pb2.ERROR_REASON_TAKEN_OVER


class Superseded(ManipleError):
    code = code_pb2.ABORTED
    reason = errors_pb2.ERROR_REASON_SUPERSEDED


class ResumeLost(ManipleError):
    code = code_pb2.DATA_LOSS
    reason = errors_pb2.ERROR_REASON_RESUME_LOST


class EventsLost(ManipleError):
    """A subscriber fell behind what is kept of the events."""

    code = code_pb2.DATA_LOSS
    reason = errors_pb2.ERROR_REASON_EVENTS_LOST


class OutOfOrder(ManipleError):
    """A delta with a gap, or a duplicate that is no resend. ``metadata["expected_step"]`` says what was due."""

    code = code_pb2.ABORTED
    reason = errors_pb2.ERROR_REASON_OUT_OF_ORDER


class Fenced(ManipleError):
    """The epoch is stale."""

    code = code_pb2.FAILED_PRECONDITION
    reason = errors_pb2.ERROR_REASON_FENCED


class LeaseHeld(ManipleError):
    code = code_pb2.FAILED_PRECONDITION
    reason = errors_pb2.ERROR_REASON_LEASE_HELD


class DeltaRefused(ManipleError):
    """A delta's content breaks a rule; nothing was changed; the rank is lost."""

    code = code_pb2.INVALID_ARGUMENT
    reason = errors_pb2.ERROR_REASON_DELTA_REFUSED


class Cancelled(ManipleError):
    code = code_pb2.CANCELLED
    reason = errors_pb2.ERROR_REASON_CANCELLED


class DeadlineExceeded(ManipleError):
    code = code_pb2.DEADLINE_EXCEEDED
    reason = errors_pb2.ERROR_REASON_DEADLINE


class NotBuilt(ManipleError):
    code = code_pb2.UNIMPLEMENTED
    reason = errors_pb2.ERROR_REASON_NOT_BUILT


class Unauthenticated(ManipleError):
    code = code_pb2.UNAUTHENTICATED
    reason = errors_pb2.ERROR_REASON_UNAUTHENTICATED


class PermissionDenied(ManipleError):
    code = code_pb2.PERMISSION_DENIED
    reason = errors_pb2.ERROR_REASON_PERMISSION_DENIED


class WrongState(ManipleError):
    code = code_pb2.FAILED_PRECONDITION
    reason = errors_pb2.ERROR_REASON_WRONG_STATE


class InternalError(ManipleError):
    """A defect. Made from an unknown exception; the log has the traceback under the incident id."""

    def __init__(self) -> None:
        super().__init__("internal error")
        self.incident_id = secrets.token_hex(6)
        self.message = f"internal error, incident {self.incident_id}"


class ConfigurationError(Exception):
    """What is wrong with a process's configuration: every fault at once, before anything starts."""

    def __init__(self, faults: list[tuple[str, object, str]]) -> None:
        """Take (field, value, rule) triples."""
        self.faults = faults
        super().__init__("\n".join(f"{field}={value!r}: {rule}" for field, value, rule in faults))
