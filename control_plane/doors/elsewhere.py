"""Ask another control plane to go on with a request, and hear its answer in the terms of the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import grpc

from control_plane.control_blob import ResumeRight
from control_plane.doors.converters import FINISH_REASONS
from control_plane.executors.rpc_errors import error_of_call
from control_plane.generation import Chunk, Cursor, Done, Event, PromptLogprobs, SampleFinished, Started
from control_plane.relay import OwnerChannels
from maniple.v1 import inference_pb2, inference_pb2_grpc
from maniple.v1.inference_pb2 import GenerateResponse
from service_chassis.ids import RequestId
from service_chassis.protocol.logprobs import Logprobs

_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}


class Elsewhere:
    """A client of other control planes. A ``ResumeAt``."""

    def __init__(self, channels: OwnerChannels) -> None:
        """Take the connections; they are not closed here."""
        self._channels = channels

    async def __call__(
        self, address: str, request_id: RequestId, right: ResumeRight, cursors: Sequence[Cursor]
    ) -> AsyncGenerator[Event, None]:
        """See ``ResumeAt``. Closing it early cancels the call, and so ends the request there."""
        request = inference_pb2.ResumeRequest(
            request_id=request_id,
            resume_token=right.token.hex(),
            cursors=[
                inference_pb2.ResumeRequest.Cursor(
                    index=cursor.index, num_tokens=cursor.num_tokens, num_text_bytes=cursor.num_text_bytes
                )
                for cursor in cursors
            ],
        )
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self._channels.to(address)
        )
        call = stub.Resume(request, metadata=self._channels.in_the_name_of(right.client_identity))
        try:
            async for message in call:
                for event in events_of(message.response):
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        finally:
            call.cancel()


def events_of(response: GenerateResponse) -> list[Event]:
    """Read a message as converters write it. None for the in-band error: the status says the same, and more."""
    kind = response.WhichOneof("event")
    if kind == "started":
        started = response.started
        return [
            Started(
                request_id=RequestId(started.request_id),
                resume_token=started.resume_token,
                num_prompt_tokens=started.num_prompt_tokens,
                num_cached_tokens=started.num_cached_tokens,
            )
        ]
    if kind == "chunk":
        chunk = response.chunk
        of_tokens = Logprobs.from_message(chunk.logprobs) if chunk.HasField("logprobs") else None
        return [Chunk(index=chunk.index, token_ids=list(chunk.token_ids), text=chunk.text, logprobs=of_tokens)]
    if kind == "finished":
        finished = response.finished
        matched = finished.WhichOneof("matched")
        end = SampleFinished(
            index=finished.index,
            reason=_REASONS[finished.reason],
            num_output_tokens=finished.num_output_tokens,
            matched_stop=finished.matched_stop if matched == "matched_stop" else None,
            matched_token_id=finished.matched_token_id if matched == "matched_token_id" else None,
        )
        if not finished.token_ids and not finished.text:
            return [end]
        # What no chunk brought, with only_final.
        of_tokens = Logprobs.from_message(finished.logprobs) if finished.HasField("logprobs") else None
        token_ids = list(finished.token_ids)
        return [Chunk(index=finished.index, token_ids=token_ids, text=finished.text, logprobs=of_tokens), end]
    if kind == "done":
        done = response.done
        of_prompt = [PromptLogprobs(columns=Logprobs.from_message(done.prompt_logprobs))]
        return [
            *(of_prompt if done.HasField("prompt_logprobs") else ()),
            Done(
                num_prompt_tokens=done.num_prompt_tokens,
                num_cached_tokens=done.num_cached_tokens,
                num_output_tokens=done.num_output_tokens,
                time_to_first_token_s=done.time_to_first_token_s,
                duration_s=done.duration_s,
            ),
        ]
    return []
