"""What the gateway's contract says of log-probabilities."""

from __future__ import annotations

from smg_grpc_proto import vllm_engine_pb2 as pb

from control_plane.doors.vllm_responses import VllmResponses
from control_plane.generation import (
    Chunk,
    Done,
    Event,
    FinishReason,
    Generation,
    PromptLogprobs,
    SampleFinished,
    SamplingChoice,
    Started,
)
from service_chassis.ids import RequestId
from service_chassis.protocol.logprobs import Logprobs

PROMPT = (7, 8, 9)
START = Started(request_id=RequestId("r"), resume_token="", num_prompt_tokens=3, num_cached_tokens=0)
DONE = Done(num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=2, time_to_first_token_s=0.1, duration_s=0.2)


def columns(*positions: tuple[list[int], list[float], int]) -> Logprobs:
    found = Logprobs(len(positions[0][0]))
    for token_ids, values, rank in positions:
        found.token_ids.extend(token_ids)
        found.values.extend(values)
        found.ranks.append(rank)
    return found


OF_PROMPT = Logprobs(2, num_unknown=1)
OF_PROMPT.extend(columns(([8, 1], [-2.0, -0.5], 3), ([9, 9], [-0.25, -0.25], 1)))
OF_FIRST = columns(([5, 6, 5], [-1.0, -0.5, -1.0], 2))
OF_SECOND = columns(([6, 6, 4], [-0.25, -0.25, -3.0], 1))


def generation(**sampling: object) -> Generation:
    return Generation(request_id=RequestId("r"), prompt_token_ids=PROMPT, sampling=SamplingChoice(**sampling))  # type: ignore[arg-type]


def said(of: Generation, *events: Event, streams: bool) -> list[pb.GenerateResponse]:
    responses = VllmResponses(of, streams=streams)
    return [one for event in (START, *events, DONE) for one in responses.take(event)]


def chunk(token_id: int, logprobs: Logprobs | None, index: int = 0) -> Chunk:
    return Chunk(index=index, token_ids=[token_id], logprobs=logprobs.part(0) if logprobs is not None else None)


def end(index: int = 0) -> SampleFinished:
    return SampleFinished(index=index, reason=FinishReason.LENGTH, num_output_tokens=2)


def top(*entries: tuple[list[float], list[int]]) -> list[pb.TopLogProbs]:
    return [pb.TopLogProbs(values=values, token_ids=token_ids) for values, token_ids in entries]


WHOLE = pb.OutputLogProbs(
    token_logprobs=[-1.0, -0.25], token_ids=[5, 6], top_logprobs=top(([-0.5, -1.0], [6, 5]), ([-0.25, -3.0], [6, 4]))
)
INPUT = pb.InputLogProbs(
    token_logprobs=[pb.InputTokenLogProb(), pb.InputTokenLogProb(value=-2.0), pb.InputTokenLogProb(value=-0.25)],
    token_ids=PROMPT,
    top_logprobs=top(([], []), ([-0.5], [1]), ([-0.25], [9])),
)


def test_whole_output_comes_with_what_was_asked() -> None:
    asked = generation(num_logprobs=2, num_prompt_logprobs=1)
    events = (PromptLogprobs(columns=OF_PROMPT), chunk(5, OF_FIRST), chunk(6, OF_SECOND), end())
    (response,) = said(asked, *events, streams=False)
    assert list(response.complete.output_ids) == [5, 6]
    assert response.complete.output_logprobs == WHOLE
    assert response.complete.input_logprobs == INPUT


def test_chunks_bring_their_own_and_the_first_of_each_sample_the_prompts() -> None:
    asked = generation(n=2, num_logprobs=2, num_prompt_logprobs=1)
    events = (
        *(PromptLogprobs(columns=OF_PROMPT), chunk(5, OF_FIRST), chunk(5, OF_FIRST, 1)),
        *(chunk(6, OF_SECOND), end(), chunk(6, OF_SECOND, 1), end(1)),
    )
    responses = said(asked, *events, streams=True)
    chunks = [one.chunk for one in responses if one.WhichOneof("response") == "chunk"]
    assert [one.index for one in chunks] == [0, 1, 0, 1]
    assert [one.HasField("input_logprobs") for one in chunks] == [True, True, False, False]
    assert [list(one.output_logprobs.token_ids) for one in chunks] == [[5], [5], [6], [6]]
    assert chunks[2].output_logprobs.top_logprobs[0] == WHOLE.top_logprobs[1]
    completes = [one.complete for one in responses if one.WhichOneof("response") == "complete"]
    assert [one.input_logprobs == INPUT for one in completes] == [True, True]
    assert not any(one.HasField("output_logprobs") for one in completes)  # the client has them


def test_zero_asks_for_the_token_alone() -> None:
    (response,) = said(generation(num_logprobs=0), chunk(5, columns(([5], [-1.0], 2))), end(), streams=False)
    assert response.complete.output_logprobs == pb.OutputLogProbs(token_logprobs=[-1.0], token_ids=[5])
    assert not response.complete.HasField("input_logprobs")


def test_nothing_is_said_to_who_did_not_ask() -> None:
    first, last = said(generation(), chunk(5, None), end(), streams=True)
    assert not first.chunk.HasField("output_logprobs")
    assert not last.complete.HasField("output_logprobs")


def test_end_waits_for_what_is_said_of_the_prompt() -> None:
    """Behind a handover it comes with the next owner's last message."""
    asked = generation(num_prompt_logprobs=1)
    (response,) = said(asked, chunk(5, None), end(), PromptLogprobs(columns=OF_PROMPT), streams=False)
    assert response.complete.input_logprobs == INPUT
    (aborted,) = said(asked, end(), streams=False)  # nothing ever came
    assert not aborted.complete.HasField("input_logprobs")
