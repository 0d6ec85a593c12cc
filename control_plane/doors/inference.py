"""``maniple.v1.InferenceService``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from control_plane.doors import converters, prompts
from control_plane.doors.calls import Context, admit, call_facts, stream_events
from control_plane.doors.embeddings import embed, to_embedding
from control_plane.doors.limits import MAX_DETOKENIZE_CONTEXTS, MAX_TOKENIZE_CHARS, check_count, check_token_ids
from control_plane.doors.served_model import ServedModel
from control_plane.doors.silence import WITHIN_S, Silence
from control_plane.generation import Chunk, Done, PromptLogprobs, SampleFinished, Started, Waiting
from control_plane.generation_stream import GenerationStream
from maniple.v1 import inference_pb2, inference_pb2_grpc
from maniple.v1.inference_pb2 import GenerateResponse
from service_chassis.auth import current_caller
from service_chassis.errors import InvalidParameter
from service_chassis.ids import RequestId
from service_chassis.interceptors import as_maniple_error
from service_chassis.protocol.logprobs import Logprobs

if TYPE_CHECKING:
    from control_plane.fleet import Fleet

SERVICE = "maniple.v1.InferenceService"


class InferenceDoor(inference_pb2_grpc.InferenceServiceServicer):
    """Translate between clients and the engine. Decides nothing."""

    def __init__(
        self,
        fleet: Fleet,
        served: ServedModel,
        *,
        new_seed: Callable[[], int] = converters.draw_seed,
        silent_within_s: float = WITHIN_S,
    ) -> None:
        """Let no stream be silent for longer than ``silent_within_s``."""
        self._silence = Silence(silent_within_s)
        self._fleet = fleet
        self._served = served
        self._new_seed = new_seed

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        fleet = self._fleet
        generation = await converters.to_generation(
            request,
            call_facts(context, fleet, client_resumes=True),
            served=self._served,
            limits=fleet.limits,
            new_seed=self._new_seed,
        )
        stream = await admit(fleet, generation)
        async with aclosing(_responses(stream, context, self._silence, "Generate")) as responses:
            async for response in responses:
                yield response

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.ResumeResponse, None]:
        request_id, token, cursors = converters.to_cursors(request)
        stream = await self._fleet.resume(request_id, token, current_caller().identity, cursors)
        async with aclosing(_responses(stream, context, self._silence, "Resume")) as responses:
            async for response in responses:
                yield inference_pb2.ResumeResponse(response=response)

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidParameter("request_id", request.request_id, "must not be empty")
        was_running = self._fleet.abort(RequestId(request.request_id), by=current_caller())
        return inference_pb2.AbortResponse(was_running=was_running)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self._served.check_name(request.model)
        text = self._served.text
        kind = request.WhichOneof("input")
        asked = request.add_special_tokens if request.HasField("add_special_tokens") else kind == "text"
        if kind == "text":
            token_ids = await prompts.text_to_ids(
                request.text, text, limit=MAX_TOKENIZE_CHARS, add_special_tokens=asked
            )
        elif kind == "chat":
            token_ids = await prompts.chat_to_ids(
                request.chat, text, limit=MAX_TOKENIZE_CHARS, add_special_tokens=asked
            )
        else:
            raise InvalidParameter("input", None, "one of text and chat must be set")
        limits = self._fleet.limits
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=limits.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        self._served.check_name(request.model)
        limits = self._fleet.limits
        check_count("token_ids", request.token_ids, MAX_DETOKENIZE_CONTEXTS * limits.max_model_len)
        check_token_ids("token_ids", request.token_ids, limits.vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await prompts.ids_to_text(request.token_ids, self._served.text, skip_special_tokens=skip)
        return inference_pb2.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        self._served.check_name(request.model)
        served, limits = self._served, self._fleet.limits
        return inference_pb2.GetModelResponse(
            served_names=served.names,
            source=served.source,
            architecture=served.text.architecture,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=served.text.eos_token_ids,
            has_chat_template=served.text.chat_template is not None,
            dtype=limits.dtype,
        )

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        fleet = self._fleet
        generation = await to_embedding(request, call_facts(context, fleet), served=self._served, limits=fleet.limits)
        answer = await embed(fleet, generation, context)
        return inference_pb2.EmbedResponse(embedding=answer.vector, num_prompt_tokens=answer.num_prompt_tokens)


async def _responses(
    stream: GenerationStream, context: Context, silence: Silence, method: str
) -> AsyncGenerator[GenerateResponse, None]:
    """Turn events into what the client hears, up to the one last message. The stream is cancelled if closed early."""
    generation = stream.generation
    whole = {index: Chunk(index=index) for index in range(generation.sampling.n)} if generation.only_final else {}
    has_begun = False
    of_prompt: Logprobs | None = None
    try:
        async with aclosing(stream_events(stream, context)) as all_events:
            with silence.broken_on(stream) as voice:
                async for event in all_events:
                    match event:
                        case Started():
                            response = converters.started_response(event)
                        case Waiting():
                            response = GenerateResponse(waiting=GenerateResponse.Waiting())
                        case PromptLogprobs():
                            of_prompt = event.columns
                            continue
                        case Chunk() if generation.only_final:
                            whole[event.index].add(event)
                            continue
                        case Chunk():
                            response = converters.chunk_response(event)
                        case SampleFinished():
                            response = converters.finished_response(event, whole.pop(event.index, None))
                        case Done():
                            response = converters.done_response(event, of_prompt)
                        case _:
                            continue
                    has_begun = voice.has_spoken = True
                    yield response
    except Exception as caught:
        error = as_maniple_error(caught, method=f"/{SERVICE}/{method}", request_id=generation.request_id)
        if has_begun:
            # Transcoders lose trailers, so a stream that began says in band how it ended. Before that the status
            # alone must speak: a message would take the right to retry from proxies.
            yield GenerateResponse(error=error.stream_error())
        raise error from caught
