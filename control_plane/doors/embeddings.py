"""Turn a prompt into a vector, for every door that embeds.

An embedding is a request like any other (admitted, queued, computed in chunks, aborted, given to another group when its
own is lost); only its output is one vector instead of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.doors import limits as rules
from control_plane.doors.calls import Context, events
from control_plane.doors.converters import CallFacts, check_room, draw_request_id
from control_plane.doors.prompts import check_ids, max_chars, text_to_ids
from control_plane.doors.served_model import ServedModel
from control_plane.generation import Done, Embedded, Generation, PoolingChoice, SamplingChoice, TextChoice
from maniple.v1.inference_pb2 import EmbedRequest
from service_chassis.errors import Cancelled, InvalidParameter
from service_chassis.ids import RequestId

if TYPE_CHECKING:
    from control_plane.engine_status import EngineLimits
    from control_plane.fleet import Fleet

_POOLINGS = {
    EmbedRequest.POOLING_UNSPECIFIED: False,
    EmbedRequest.POOLING_LAST: False,
    EmbedRequest.POOLING_MEAN: True,
}


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a client gets."""

    vector: Sequence[float]
    num_prompt_tokens: int


async def to_embedding(
    request: EmbedRequest, call: CallFacts, *, served: ServedModel, limits: EngineLimits
) -> Generation:
    """Check a request against the model and the limits; a prompt may be as long as one that generates.

    Raises:
        InvalidParameter: names field, value and rule.
        UnknownModel: it asks for a model that is not served.
    """
    served.check_name(request.model)
    request_id = request.request_id or draw_request_id()
    rules.check_request_id(request_id)
    if request.pooling not in _POOLINGS:
        raise InvalidParameter("pooling", request.pooling, "must be POOLING_LAST or POOLING_MEAN")
    is_mean = _POOLINGS[request.pooling]
    kind = request.WhichOneof("prompt")
    if kind == "text":
        prompt = await text_to_ids(request.text, served.text, limit=max_chars(served.text, limits.max_model_len))
    elif kind == "token_ids":
        prompt = check_ids(request.token_ids.ids, limits.vocab_size)
    else:
        raise InvalidParameter("prompt", None, "one of text and token_ids must be set")
    if not prompt:
        raise InvalidParameter("prompt", [], "must have at least one token")
    check_room(len(prompt), limits)
    return Generation(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingChoice(temperature=0.0, max_tokens=1),
        text=TextChoice(skip_text=True),
        # The cache holds keys and values, and a mean needs the hidden state of every token.
        skip_reading_prefix_cache=is_mean,
        deadline=call.deadline,
        client_identity=call.client_identity,
        traceparent=call.traceparent,
        pooling=PoolingChoice(is_mean=is_mean, normalize=request.normalize if request.HasField("normalize") else True),
    )


async def embed(fleet: Fleet, generation: Generation, context: Context) -> Embedding:
    """Compute the vector of a generation that pools; it is cancelled when the caller goes away.

    Raises:
        Cancelled: it was aborted by somebody.
        ManipleError: it ended badly.
    """
    vector: Sequence[float] | None = None
    num_prompt_tokens = 0
    async with aclosing(events(fleet, generation, context)) as all_events:
        async for event in all_events:
            if isinstance(event, Embedded):
                vector = event.vector
            elif isinstance(event, Done):
                num_prompt_tokens = event.num_prompt_tokens
    if vector is None:
        raise Cancelled("the request was aborted before its vector was complete")
    return Embedding(vector, num_prompt_tokens)
