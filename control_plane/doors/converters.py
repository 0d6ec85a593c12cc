"""Turn what clients say on ``maniple.v1`` into engine values, and engine events into what clients hear.

The other doors translate their requests into ``maniple.v1`` ones and come through here, so that every default is
resolved and every range checked in one place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.doors import limits as rules
from control_plane.doors.prompts import chat_to_ids, check_ids, max_chars, text_to_ids
from control_plane.doors.sampling_rules import resolve_sampling, resolve_text, room_for_logprobs
from control_plane.doors.served_model import ServedModel
from control_plane.generation import Chunk, Cursor, Done, FinishReason, Generation, SampleFinished, Started
from maniple.v1 import inference_pb2
from maniple.v1.inference_pb2 import GenerateRequest, GenerateResponse, ResumeRequest
from service_chassis.errors import InvalidParameter, NotBuilt
from service_chassis.ids import RequestId
from service_chassis.protocol.block_hash import namespace_of
from service_chassis.protocol.logprobs import Logprobs

if TYPE_CHECKING:
    from control_plane.engine_status import EngineLimits

FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What a call says beside its request."""

    deadline: float | None = None  # on the engine's clock
    client_identity: str = ""
    traceparent: str = ""
    client_resumes: bool = False  # the door tells clients how to resume


def draw_request_id() -> str:
    """Return an id for a request that brought none."""
    return f"gen-{secrets.token_hex(12)}"


def draw_seed() -> int:
    """Return a seed from the system, so that no two servers repeat each other."""
    return secrets.randbits(64)


async def to_generation(
    request: GenerateRequest,
    call: CallFacts,
    *,
    served: ServedModel,
    limits: EngineLimits,
    new_seed: Callable[[], int] = draw_seed,
) -> Generation:
    """Check a request against the model and the limits.

    Raises:
        InvalidParameter: names field, value and rule.
        UnknownModel: it asks for a model that is not served.
        NotBuilt: it asks for what the protocol reserves.
    """
    served.check_name(request.model)
    _check_built(request)
    request_id = request.request_id or draw_request_id()
    rules.check_request_id(request_id)
    if len(request.cache_salt.encode()) > rules.MAX_CACHE_SALT_BYTES:
        rule = f"must have at most {rules.MAX_CACHE_SALT_BYTES} bytes"
        raise InvalidParameter("cache_salt", f"{len(request.cache_salt.encode())} bytes", rule)
    prompt = await _prompt(request, served, limits)
    sampling = resolve_sampling(
        request.sampling,
        served.text,
        vocab_size=limits.vocab_size,
        room=room_for_logprobs(
            request.sampling,
            num_prompt_tokens=len(prompt),
            room=check_room(len(prompt), limits),
            only_final=request.only_final,
        ),
        draw_seed=new_seed,
    )
    return Generation(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        text=resolve_text(request.sampling, skip_text=request.skip_text),
        priority=request.priority,
        cache_namespace=namespace_of("", request.cache_salt),
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        deadline=call.deadline,
        detach_grace_s=rules.check_number("detach_grace_s", request.detach_grace_s, 0, rules.MAX_DETACH_GRACE_S),
        only_final=request.only_final,
        client_resumes=call.client_resumes,
        client_identity=call.client_identity,
        traceparent=call.traceparent,
    )


def to_cursors(request: ResumeRequest) -> tuple[RequestId, bytes, list[Cursor]]:
    """Read who resumes what, and from where.

    Raises:
        InvalidParameter: names field, value and rule; never the token.
    """
    rules.check_request_id(request.request_id)
    try:
        token = bytes.fromhex(request.resume_token)
    except ValueError:
        raise InvalidParameter("resume_token", "…", "must be the resume_token of `started`") from None
    rules.check_count("cursors", request.cursors, rules.MAX_CURSORS)
    indices = [cursor.index for cursor in request.cursors]
    if len(set(indices)) < len(indices):
        raise InvalidParameter("cursors.index", indices, "must name each sample once")
    cursors = [
        Cursor(index=cursor.index, num_tokens=cursor.num_tokens, num_text_bytes=cursor.num_text_bytes)
        for cursor in request.cursors
    ]
    return RequestId(request.request_id), token, cursors


def _check_built(request: GenerateRequest) -> None:
    if request.lora:
        raise NotBuilt("lora is reserved in the protocol and not built yet")


async def _prompt(request: GenerateRequest, served: ServedModel, limits: EngineLimits) -> list[int]:
    kind = request.WhichOneof("prompt")
    # What is truncated may be longer than the context.
    is_cut = request.sampling.HasField("truncate_prompt_tokens")
    limit = None if is_cut else max_chars(served.text, limits.max_model_len)
    if kind == "text":
        prompt = await text_to_ids(request.text, served.text, limit=limit)
    elif kind == "chat":
        prompt = await chat_to_ids(request.chat, served.text, limit=limit)
    elif kind == "token_ids":
        prompt = check_ids(request.token_ids.ids, limits.vocab_size)
    else:
        raise InvalidParameter("prompt", None, "one of text, token_ids and chat must be set")
    if not prompt:
        raise InvalidParameter("prompt", [], "must have at least one token")
    if is_cut:
        keep = request.sampling.truncate_prompt_tokens
        rules.check_number("truncate_prompt_tokens", keep, 1)
        prompt = prompt[-keep:]
    return prompt


def check_room(num_prompt_tokens: int, limits: EngineLimits) -> int:
    """Return how many tokens fit behind a prompt, at least one; or raise ``InvalidParameter``."""
    said = f"{num_prompt_tokens} tokens"
    if num_prompt_tokens >= limits.max_model_len:
        rule = f"must be shorter than max_model_len, {limits.max_model_len} tokens, to leave room for output"
        raise InvalidParameter("prompt", said, rule)
    capacity = (limits.num_blocks - 1) * limits.block_size  # block 0 is the null block
    if num_prompt_tokens > capacity:
        rule = f"needs more KV blocks than exist: {limits.num_blocks - 1} blocks hold {capacity} tokens"
        raise InvalidParameter("prompt", said, rule)
    return min(limits.max_model_len, capacity + 1) - num_prompt_tokens  # the last token is sampled and never computed


def started_response(event: Started) -> GenerateResponse:
    """Return the first message of a stream."""
    return GenerateResponse(
        started=GenerateResponse.Started(
            request_id=event.request_id,
            resume_token=event.resume_token,
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
        )
    )


def chunk_response(event: Chunk) -> GenerateResponse:
    """Return a message with new output."""
    chunk = GenerateResponse.Chunk(index=event.index, token_ids=event.token_ids, text=event.text)
    if event.logprobs is not None:
        chunk.logprobs.CopyFrom(event.logprobs.to_message())
    return GenerateResponse(chunk=chunk)


def finished_response(event: SampleFinished, whole: Chunk | None) -> GenerateResponse:
    """Return the end of a sample, with its whole output where no chunks were sent."""
    finished = GenerateResponse.Finished(
        index=event.index, reason=FINISH_REASONS[event.reason], num_output_tokens=event.num_output_tokens
    )
    if event.matched_stop is not None:
        finished.matched_stop = event.matched_stop
    elif event.matched_token_id is not None:
        finished.matched_token_id = event.matched_token_id
    if whole is not None:
        finished.token_ids.extend(whole.token_ids)
        finished.text = whole.text
        if whole.logprobs is not None:
            finished.logprobs.CopyFrom(whole.logprobs.to_message())
    return GenerateResponse(finished=finished)


def done_response(event: Done, of_prompt: Logprobs | None) -> GenerateResponse:
    """Return the last message of a good stream."""
    done = GenerateResponse.Done(
        num_prompt_tokens=event.num_prompt_tokens,
        num_cached_tokens=event.num_cached_tokens,
        num_output_tokens=event.num_output_tokens,
        time_to_first_token_s=event.time_to_first_token_s,
        duration_s=event.duration_s,
    )
    if of_prompt is not None:
        done.prompt_logprobs.CopyFrom(of_prompt.to_message())
    return GenerateResponse(done=done)
