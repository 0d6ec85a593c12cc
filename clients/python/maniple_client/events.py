"""What a generation yields, and what is kept of it while it streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maniple.v1 import inference_pb2, sampling_pb2

FinishReason = Literal["stop", "length", "abort", "unknown"]
_REASONS: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """What one token was given. ``top`` holds as many of the likeliest as were asked for, (id, value) each."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...]


# A position a token; None where nothing is known: nothing precedes the first of a prompt.
Logprobs = tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request entered the batch. ``resume_token`` takes it up again after a broken stream; empty: nothing can."""

    request_id: str
    resume_token: str
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New output of one sample. Text may lag behind ids, while a character or a stop string is incomplete."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: Logprobs = ()  # of ``token_ids``, with ``logprobs``


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One sample ended. Ids, text and log-probabilities are of the whole output with ``only_final``, else empty."""

    index: int
    reason: FinishReason
    num_output_tokens: int
    matched_stop: str | None
    matched_token_id: int | None
    token_ids: tuple[int, ...]
    text: str
    logprobs: Logprobs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All samples ended; the last event of a good stream. Times are the server's, in seconds from arrival."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float  # 0: not known, see inference.proto
    duration_s: float
    prompt_logprobs: Logprobs = ()  # with ``prompt_logprobs``


Event = Started | Chunk | Finished | Done


def event_of(response: inference_pb2.GenerateResponse) -> Event | None:
    """Return the event in a message; None for the error event and for what a newer server may send."""
    kind = response.WhichOneof("event")
    if kind == "chunk":
        chunk = response.chunk
        return Chunk(
            index=chunk.index,
            token_ids=tuple(chunk.token_ids),
            text=chunk.text,
            logprobs=_logprobs(chunk.logprobs),
        )
    if kind == "started":
        started = response.started
        return Started(
            request_id=started.request_id,
            resume_token=started.resume_token,
            num_prompt_tokens=started.num_prompt_tokens,
            num_cached_tokens=started.num_cached_tokens,
        )
    if kind == "finished":
        finished = response.finished
        matched = finished.WhichOneof("matched")
        return Finished(
            index=finished.index,
            reason=_REASONS.get(finished.reason, "unknown"),
            num_output_tokens=finished.num_output_tokens,
            matched_stop=finished.matched_stop if matched == "matched_stop" else None,
            matched_token_id=finished.matched_token_id if matched == "matched_token_id" else None,
            token_ids=tuple(finished.token_ids),
            text=finished.text,
            logprobs=_logprobs(finished.logprobs),
        )
    if kind == "done":
        done = response.done
        return Done(
            num_prompt_tokens=done.num_prompt_tokens,
            num_cached_tokens=done.num_cached_tokens,
            num_output_tokens=done.num_output_tokens,
            time_to_first_token_s=done.time_to_first_token_s,
            duration_s=done.duration_s,
            prompt_logprobs=_logprobs(done.prompt_logprobs),
        )
    return None


def _logprobs(message: sampling_pb2.TokenLogprobs) -> Logprobs:
    return tuple(
        TokenLogprob(
            token_id=position.token_ids[0],
            logprob=position.logprobs[0],
            rank=position.rank,
            top=tuple(zip(position.token_ids[1:], position.logprobs[1:], strict=True)),
        )
        if position.rank
        else None
        for position in message.positions
    )


@dataclass(slots=True)
class Sample:
    """What has come of one sample so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)  # a position a token, with ``logprobs``
    finished: Finished | None = None


@dataclass(slots=True)
class Transcript:
    """All that a stream has brought so far. A broken stream is resumed from here: ids and bytes of text per sample."""

    started: Started | None = None
    samples: dict[int, Sample] = field(default_factory=dict)
    done: Done | None = None
    _began_before: bool = False

    def add(self, event: Event) -> None:
        match event:
            case Chunk():
                sample = self.samples.setdefault(event.index, Sample())
                sample.text += event.text
                sample.token_ids += event.token_ids
                sample.logprobs += event.logprobs
            case Finished():
                sample = self.samples.setdefault(event.index, Sample())
                sample.finished = event
                sample.text += event.text
                sample.token_ids += event.token_ids
                sample.logprobs += event.logprobs
            case Started():
                self.started = event
            case Done():
                self.done = event

    @property
    def can_resume(self) -> bool:
        """Whether the server gave the right to resume."""
        return self.started is not None and bool(self.started.resume_token)

    def start_over(self) -> None:
        """Forget that the request began, since no server knows of it; there is no output to forget."""
        assert not self.samples
        self._began_before, self.started = True, None

    def news_in(self, event: Event | None) -> Event | None:
        """Return the event unless it was told before: a resumed stream says again what began and what ended."""
        if isinstance(event, Started) and self._began_before:
            self.started = event
            return None
        if isinstance(event, Started) and self.started is not None:
            return None
        if isinstance(event, Finished) and event.index in self.samples and self.samples[event.index].finished:
            return None
        return event

    def cursors(self) -> list[inference_pb2.ResumeRequest.Cursor]:
        """Return what ``Resume`` needs to know of what is here already."""
        return [
            inference_pb2.ResumeRequest.Cursor(
                index=index, num_tokens=len(sample.token_ids), num_text_bytes=len(sample.text.encode())
            )
            for index, sample in sorted(self.samples.items())
        ]
