"""Turn a generation into what the scheduler takes, and refuse what the workers of a group cannot give."""

from __future__ import annotations

from dataclasses import replace

import structlog

from control_plane.control_blob import write_blob
from control_plane.deltas import RowPayload, row_payload, row_pooling
from control_plane.engine_status import EngineLimits
from control_plane.generation import Generation
from control_plane.live_request import LiveRequest
from control_plane.scheduling.request import Request
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from service_chassis.errors import InternalError, InvalidParameter, NotBuilt

log = structlog.get_logger(__name__)

# What the rows of one request may say of it besides its tokens. The largest allowed_token_ids takes three quarters.
MAX_PAYLOAD_BYTES = 2 << 20


def check_workers_can(generation: Generation, limits: EngineLimits) -> None:
    """Raise where a request asks for what the workers of the group cannot do.

    Raises:
        InvalidParameter: they serve plain sampling alone.
        NotBuilt: they are of an earlier release.
    """
    sampling = generation.sampling
    if not limits.full_sampling and (beyond := sampling.beyond_plain()) is not None:
        raise InvalidParameter(*beyond, "the scripted model without torch serves greedy, seeded and forced output")
    asks_logprobs = sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
    if asks_logprobs and not limits.logprobs:
        raise NotBuilt("the workers of this group tell no log-probabilities: they are of an earlier release")
    if generation.pooling is not None and not limits.pooling:
        raise NotBuilt("the workers of this group cannot embed: they are of an earlier release")


def scheduled_request(generation: Generation, *, masked: bool, now: float) -> Request:
    """Return what the scheduler needs of a generation. Its payload is written once its stream exists."""
    sampling = generation.sampling
    return Request(
        request_id=generation.request_id,
        prompt_token_ids=generation.prompt_token_ids,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens if not masked else 0,  # masks see to it
        stop_ids=sampling.eos_ids | sampling.stop_token_ids,
        n=sampling.n,
        priority=generation.priority,
        arrival=now,
        deadline=generation.deadline,
        cache_namespace=generation.cache_namespace,
        skip_reading_prefix_cache=not generation.reads_prefix_cache,
        pools=generation.pooling is not None,
        result_entries=generation.prompt_entries,
        masked=masked,
    )


def written_payload(live: LiveRequest, arrival_number: int) -> RowPayload:
    """Write down all that deltas will say of a request and that does not depend on the step.

    Raises:
        InvalidParameter: it has too much to say.
        ValueError, TypeError, OverflowError: something is out of a field's range, or of another type. Here it fails
            alone; in a delta it would take all along.
    """
    generation = live.generation
    payload = row_payload(generation.sampling)
    blob = write_blob(generation, payload.sampling, arrival_number=arrival_number, right=live.right)
    pooling = row_pooling(generation.pooling) if generation.pooling is not None else None
    payload = replace(payload, control_blob=blob, pooling=pooling)
    SchedulerDelta().new_requests.add(
        request_id=generation.request_id,
        token_ids=generation.prompt_token_ids,
        n=generation.sampling.n,
        cache_namespace=generation.cache_namespace,
    )
    if payload.num_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidParameter("sampling", f"{payload.num_bytes} bytes", f"may have at most {MAX_PAYLOAD_BYTES}")
    return payload


def unwritable(generation: Generation, error: Exception) -> InternalError:
    """Return what the client is told where ``written_payload`` failed, which a door should have noticed."""
    internal = InternalError()
    log.error(  # without the traceback, whose locals hold the prompt
        "request.unwritable",
        request_id=generation.request_id,
        incident_id=internal.incident_id,
        reason=str(error),
    )
    return internal
