"""What clients are told where the scheduler refuses their request, or its group is lost."""

from __future__ import annotations

from control_plane.group.loss import LossKind, LossReason
from control_plane.scheduling.request import Refusal, RefusalKind
from service_chassis.errors import (
    DuplicateRequest,
    GroupLost,
    GroupLostBeforeStart,
    InvalidParameter,
    ManipleError,
    QueueFull,
    TakenOver,
)

# What a client is told to wait when the queue is full. A queue turns over in seconds, not minutes.
QUEUE_RETRY_S = 1.0


def error_of_refusal(refusal: Refusal, num_prompt_tokens: int) -> ManipleError:
    """Return the error for a request that is not let in."""
    if refusal.kind is RefusalKind.DUPLICATE:
        return DuplicateRequest(refusal.sentence)
    if refusal.kind is RefusalKind.QUEUE_FULL:
        return QueueFull(refusal.sentence, retry_after_s=QUEUE_RETRY_S)
    return InvalidParameter("prompt", f"{num_prompt_tokens} tokens", refusal.sentence)


def error_of_loss(loss: LossReason, *, has_started: bool) -> ManipleError:
    """Return the error for a request whose group is lost and that no other group takes (docs/errors.md)."""
    if not has_started:
        return GroupLostBeforeStart(f"the group was lost before the request started: {loss.reason}")
    if loss.kind is LossKind.FENCED:
        where = {"owner_address": loss.owner_address} if loss.owner_address else {}
        return TakenOver(f"another control plane holds the group: {loss.reason}", metadata=where)
    if loss.kind is LossKind.UNPROVEN:
        return TakenOver(f"another control plane may hold the group: {loss.reason}")
    return GroupLost(f"the group was lost: {loss.reason}")
