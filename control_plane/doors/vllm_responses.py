"""Say in the words of ``vllm.grpc.engine`` what one generation brings."""

from __future__ import annotations

from smg_grpc_proto import vllm_engine_pb2

from control_plane.doors.vllm_converters import FINISH_REASONS
from control_plane.generation import Chunk, Done, Event, Generation, PromptLogprobs, SampleFinished, Started
from service_chassis.protocol.logprobs import Logprobs


class VllmResponses:
    """The responses of one call: with ``streams`` chunks of new ids; always one ``complete`` a sample, with all ids.

    Log-probabilities of the output go with the chunks, or else with ``complete``; those of the prompt with the first
    chunk of each sample, and with ``complete``.
    """

    def __init__(self, generation: Generation, *, streams: bool) -> None:
        self._generation = generation
        self._streams = streams
        self._outputs = {index: Chunk(index=index) for index in range(generation.sampling.n)}
        self._has_begun: set[int] = set()  # samples with a chunk
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._of_prompt: vllm_engine_pb2.InputLogProbs | None = None
        self._held: list[vllm_engine_pb2.GenerateComplete] = []  # until it is known what is said of the prompt

    def take(self, event: Event) -> list[vllm_engine_pb2.GenerateResponse]:
        """Return what the client is told of an event."""
        match event:
            case Started():
                self._num_prompt_tokens = event.num_prompt_tokens
                self._num_cached_tokens = event.num_cached_tokens
            case PromptLogprobs():
                self._of_prompt = _of_prompt(event.columns, self._generation.prompt_token_ids)
                return self._let_go()
            case Chunk():
                self._outputs[event.index].add(event)
                if self._streams and event.token_ids:
                    return [self._chunk(event)]
            case SampleFinished():
                self._held.append(self._complete(event))
                if self._of_prompt is not None or self._generation.sampling.num_prompt_logprobs is None:
                    return self._let_go()
            case Done():
                return self._let_go()  # aborted before anything was known of the prompt
        return []

    def _chunk(self, event: Chunk) -> vllm_engine_pb2.GenerateResponse:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=event.token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._outputs[event.index].token_ids),
            cached_tokens=self._num_cached_tokens,
            index=event.index,
        )
        if event.logprobs is not None:
            chunk.output_logprobs.CopyFrom(_of_output(event.logprobs, event.token_ids))
        if event.index not in self._has_begun and self._of_prompt is not None:
            chunk.input_logprobs.CopyFrom(self._of_prompt)
        self._has_begun.add(event.index)
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _complete(self, event: SampleFinished) -> vllm_engine_pb2.GenerateComplete:
        output = self._outputs.pop(event.index)
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=output.token_ids,
            finish_reason=FINISH_REASONS[event.reason],
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=event.num_output_tokens,
            cached_tokens=self._num_cached_tokens,
            index=event.index,
        )
        if event.matched_stop is not None:
            complete.matched_stop_str = event.matched_stop
        elif event.matched_token_id is not None:
            complete.matched_token_id = event.matched_token_id
        if output.logprobs is not None and not self._streams:
            complete.output_logprobs.CopyFrom(_of_output(output.logprobs, output.token_ids))
        return complete

    def _let_go(self) -> list[vllm_engine_pb2.GenerateResponse]:
        held, self._held = self._held, []
        for complete in held:
            if self._of_prompt is not None:
                complete.input_logprobs.CopyFrom(self._of_prompt)
        return [vllm_engine_pb2.GenerateResponse(complete=complete) for complete in held]


def _of_output(columns: Logprobs, token_ids: list[int]) -> vllm_engine_pb2.OutputLogProbs:
    message = vllm_engine_pb2.OutputLogProbs(token_ids=token_ids)
    for index, rank in enumerate(columns.ranks):
        # Nothing is known of a token whose group was lost.
        message.token_logprobs.append(columns.values[index * columns.width] if rank else -float("inf"))
        _add_likeliest(message.top_logprobs, columns, index)
    return message


def _of_prompt(columns: Logprobs, token_ids: tuple[int, ...]) -> vllm_engine_pb2.InputLogProbs:
    message = vllm_engine_pb2.InputLogProbs(token_ids=token_ids)
    for index, rank in enumerate(columns.ranks):
        of_token = message.token_logprobs.add()
        if rank:
            of_token.value = columns.values[index * columns.width]
        _add_likeliest(message.top_logprobs, columns, index)
    return message


def _add_likeliest(lists: object, columns: Logprobs, index: int) -> None:
    """Add the likeliest of one position, where any were asked for; of a position that says nothing an empty list."""
    if columns.width == 1:
        return
    entries = slice(index * columns.width + 1, (index + 1) * columns.width if columns.ranks[index] else 0)
    lists.add(values=columns.values[entries], token_ids=columns.token_ids[entries])  # type: ignore[attr-defined]
