"""Begin a generation, or take it up again: the same stream of events either way."""

from __future__ import annotations

import time
from typing import Any

from maniple.v1 import inference_pb2
from maniple_client.events import Transcript


def open_call(
    inference: Any, request: inference_pb2.GenerateRequest, transcript: Transcript, timeout_s: float | None
) -> Any:
    """Call Generate, or Resume with what the transcript has already. For either kind of stub."""
    started = transcript.started
    if started is None:
        return inference.Generate(request, timeout=timeout_s)
    resume = inference_pb2.ResumeRequest(
        request_id=started.request_id, resume_token=started.resume_token, cursors=transcript.cursors()
    )
    return inference.Resume(resume, timeout=timeout_s)


def response_of(message: Any) -> inference_pb2.GenerateResponse:
    """Return what a message of either call says."""
    response: inference_pb2.GenerateResponse = (
        message.response if isinstance(message, inference_pb2.ResumeResponse) else message
    )
    return response


def left_s(deadline: float | None) -> float | None:
    """Return what is left of a deadline of the caller's, for the next call."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.001)
