"""What one control plane writes, another reads as the events that they were."""

from __future__ import annotations

from dataclasses import fields

import pytest

from control_plane.doors.converters import chunk_response, done_response, finished_response, started_response
from control_plane.doors.elsewhere import events_of
from control_plane.generation import Chunk, Done, FinishReason, PromptLogprobs, SampleFinished, Started
from maniple.v1.errors_pb2 import StreamError
from maniple.v1.inference_pb2 import GenerateResponse
from service_chassis.ids import RequestId
from service_chassis.protocol.logprobs import Logprobs

STARTED = Started(request_id=RequestId("r"), resume_token="ab12", num_prompt_tokens=7, num_cached_tokens=4)
LOGPROBS = Logprobs(2, num_unknown=1)
LOGPROBS.token_ids.extend([0, 3, 7, 7])
LOGPROBS.values.extend([-2.5, -0.5, -0.25, -0.25])
LOGPROBS.ranks.extend([4, 1])
CHUNK = Chunk(index=2, token_ids=[5, 0, 7], text="é!", logprobs=LOGPROBS)
DONE = Done(num_prompt_tokens=7, num_cached_tokens=4, num_output_tokens=9, time_to_first_token_s=0.25, duration_s=1.5)
ENDS = {
    "length": SampleFinished(index=1, reason=FinishReason.LENGTH, num_output_tokens=3),
    "abort": SampleFinished(index=1, reason=FinishReason.ABORT, num_output_tokens=3),
    "stop": SampleFinished(index=0, reason=FinishReason.STOP, num_output_tokens=3, matched_stop="."),
    "stop-id": SampleFinished(index=0, reason=FinishReason.STOP, num_output_tokens=3, matched_token_id=0),
}


def test_started_chunk_and_done_come_back_as_they_were() -> None:
    assert events_of(started_response(STARTED)) == [STARTED]
    assert events_of(chunk_response(CHUNK)) == [CHUNK]
    assert events_of(done_response(DONE, None)) == [DONE]


def test_what_is_said_of_a_prompt_comes_before_the_end() -> None:
    assert events_of(done_response(DONE, LOGPROBS)) == [PromptLogprobs(columns=LOGPROBS), DONE]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_end_of_a_sample_comes_back_as_it_was(end: SampleFinished) -> None:
    assert events_of(finished_response(end, None)) == [end]


def test_whole_output_comes_back_before_its_end() -> None:
    whole = Chunk(index=1, token_ids=[5, 6, 7], text="ab", logprobs=LOGPROBS)
    assert events_of(finished_response(ENDS["length"], whole)) == [whole, ENDS["length"]]


def test_in_band_error_is_no_event() -> None:
    assert events_of(GenerateResponse(error=StreamError(message="lost"))) == []


@pytest.mark.parametrize("event", [STARTED, CHUNK, DONE], ids=["started", "chunk", "done"])
def test_every_field_of_an_event_is_tried_here(event: Started | Chunk | Done) -> None:
    """What is added to an event has to travel too."""
    for field in fields(event):
        assert getattr(event, field.name) not in (None, 0, "", []), field.name
