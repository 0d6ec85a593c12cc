"""One admitted generation in the engine: its stream, the text side of its samples, and what the log says of it.

All that a client was or will be told is kept until the request is forgotten, so that another stream can take it up at
any point; one that nobody reads at the moment goes on without a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_plane.control_blob import ResumeRight, draw_resume_right
from control_plane.generation import (
    Chunk,
    Cursor,
    Done,
    FinishReason,
    Generation,
    PromptLogprobs,
    SampleFinished,
    Started,
)
from control_plane.generation_stream import GenerationStream
from control_plane.text.detokenizer import Detokenizer
from control_plane.text.tokenizer import Tokenizer
from service_chassis.errors import InvalidParameter, ManipleError, PermissionDenied, ResumeLost, Superseded
from service_chassis.protocol.logprobs import Logprobs

if TYPE_CHECKING:
    from control_plane.structured_output.compiler import Grammar


@dataclass(slots=True)
class LiveSample:
    """One sample. ``reason`` is set once, by whichever rule came first in its output."""

    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)  # of its output, those that count
    text: list[str] = field(default_factory=list)  # pieces, as they became certain
    unread: list[int] = field(default_factory=list)  # its last ids, of which there is no text yet
    logprobs: Logprobs | None = None  # a position a token, where asked for
    reason: FinishReason | None = None
    finished: SampleFinished | None = None  # what the client is told, where it ended well

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class LiveRequest:
    """What is kept of a request until it is forgotten. Owned by the engine's loop."""

    generation: Generation
    stream: GenerationStream | None  # None: nobody reads
    arrived_at: float
    right: ResumeRight
    samples: list[LiveSample] = field(default_factory=list)
    started_at: float | None = None  # entered its first delta
    first_token_at: float | None = None
    can_be_resumed: bool = True  # its client is told how
    has_earlier_tokens: bool = False  # of another owner, so nobody knows when the first one came
    num_cached_tokens: int = 0
    num_losses: int = 0  # of groups that were computing it
    grammar: Grammar | None = None  # of its constraint, once that is compiled
    prompt_logprobs: Logprobs | None = None  # where asked for: what is known of its head, a position a token
    has_told_prompt: bool = False  # all of it, to the client
    detached_until: float | None = None  # without a stream: when nobody will come any more
    last: Done | ManipleError | None = None  # the last event, once there is one
    tells_ids_alone: bool = False  # no text, no stop strings, no log-probabilities: ids are passed on as they are

    @classmethod
    def of(
        cls,
        generation: Generation,
        stream: GenerationStream | None,
        tokenizer: Tokenizer,
        now: float,
        right: ResumeRight | None = None,
    ) -> LiveRequest:
        """Take a generation in; ``right`` is drawn unless it was before."""
        sampling = generation.sampling
        width = None if sampling.num_logprobs is None else sampling.num_logprobs + 1
        samples = [
            LiveSample(
                Detokenizer(
                    tokenizer,
                    generation.text,
                    prompt_token_ids=generation.prompt_token_ids,
                    min_tokens=sampling.min_tokens,
                ),
                logprobs=None if width is None else Logprobs(width),
            )
            for _ in range(sampling.n)
        ]
        live = cls(generation, stream, now, right or draw_resume_right(generation.client_identity), samples)
        text = generation.text
        tells_logprobs = sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
        live.tells_ids_alone = text.skip_text and not text.stop and not tells_logprobs
        if sampling.num_prompt_logprobs is not None:
            # Nothing precedes the first token.
            live.prompt_logprobs = Logprobs(sampling.num_prompt_logprobs + 1, num_unknown=1)
        return live

    @property
    def is_over(self) -> bool:
        """Whether every sample ended."""
        return all(sample.reason is not None for sample in self.samples)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None where none came, or where an earlier owner saw it come."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def num_output_tokens(self) -> int:
        return sum(sample.num_output_tokens for sample in self.samples)

    def start(self, num_cached_tokens: int, now: float) -> None:
        """Tell the client that its request entered a delta."""
        self.started_at = now
        self.num_cached_tokens = num_cached_tokens
        if self.stream is not None:
            self.stream.put_started(self._started())

    def _started(self) -> Started:
        return Started(
            request_id=self.generation.request_id,
            resume_token=self.right.token.hex() if self.can_be_resumed else "",
            num_prompt_tokens=len(self.generation.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
        )

    def attach(self, stream: GenerationStream, cursors: Sequence[Cursor]) -> None:
        """Let another stream go on after what its client has. The present one, if there is one, ends as superseded.

        Raises:
            InvalidParameter: a cursor that no client of this request can have.
            ResumeLost: a cursor beyond what is known.
        """
        by_index = {cursor.index: cursor for cursor in cursors}
        for sample in self.samples:
            self._read_up(sample)
        parts = [self._after(index, by_index.get(index, Cursor(index=index))) for index in range(len(self.samples))]
        if any(index >= len(self.samples) for index in by_index):
            raise InvalidParameter("cursors.index", max(by_index), f"must be below {len(self.samples)}")
        if self.stream is not None:
            self.stream.close(Superseded("a newer stream took the request over"))
        self.stream, self.detached_until = stream, None
        stream.put_started(self._started())
        if self.has_told_prompt and self.prompt_logprobs is not None:
            stream.put_prompt_logprobs(self.prompt_logprobs)
        for index, (token_ids, text) in enumerate(parts):
            if token_ids or text:
                known = self.samples[index].logprobs
                first = len(self.samples[index].token_ids) - len(token_ids)
                stream.put_tokens(index, token_ids, text, known.part(first) if known is not None else None)
            finished = self.samples[index].finished
            if finished is not None:
                stream.put_finished(finished)
        if self.last is not None:
            stream.close(self.last)

    def detach(self, until: float) -> None:
        """Go on without a stream, until another one comes."""
        self.stream, self.detached_until = None, until

    def _after(self, index: int, cursor: Cursor) -> tuple[list[int], str]:
        """Return ids and text of one sample behind a cursor."""
        sample = self.samples[index]
        raw = "".join(sample.text).encode()
        if cursor.num_tokens > len(sample.token_ids) or cursor.num_text_bytes > len(raw):
            wanted = f"{cursor.num_tokens} tokens and {cursor.num_text_bytes} bytes of text"
            known = f"{len(sample.token_ids)} and {len(raw)}"
            raise ResumeLost(f"sample {index}: the cursor is at {wanted}; what survived are {known}")
        try:
            text = raw[cursor.num_text_bytes :].decode()
        except UnicodeDecodeError:
            rule = "must lie between characters"
            raise InvalidParameter("cursors.num_text_bytes", cursor.num_text_bytes, rule) from None
        return sample.token_ids[cursor.num_tokens :], text

    def told(self) -> list[Cursor]:
        """Return how far each sample's client is."""
        return [
            Cursor(index=index, num_tokens=len(sample.token_ids), num_text_bytes=len("".join(sample.text).encode()))
            for index, sample in enumerate(self.samples)
        ]

    def tell(self, event: PromptLogprobs | Chunk | SampleFinished) -> None:
        """Pass on what another control plane says of this request, from what was told here on."""
        if isinstance(event, PromptLogprobs):
            if not self.has_told_prompt:
                self.note_prompt(0, event.columns)
                self._tell_prompt()
            return
        sample = self.samples[event.index]
        if sample.reason is not None:
            return  # a resumed stream says again what ended before
        if isinstance(event, Chunk):
            self._tell(event.index, event.token_ids, event.text, event.logprobs)
        else:
            sample.reason, sample.finished = event.reason, event
            if self.stream is not None:
                self.stream.put_finished(event)

    def push(
        self,
        index: int,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        matched_token_id: int | None,
        now: float,
        logprobs: Logprobs | None = None,
    ) -> str | None:
        """Turn new tokens of one sample into events.

        Args:
            index: the sample.
            token_ids: new ids, up to and including one that ended the sample.
            finish: set if the token rules ended the sample with the last of ``token_ids``.
            matched_token_id: the stop id, with ``finish`` STOP.
            now: the engine's time.
            logprobs: of ``token_ids``, a position each, and perhaps of more; None where nothing is known of them.
        Returns:
            The stop string if one ended the sample here, before the token rules did.
        """
        sample = self.samples[index]
        if sample.reason is not None:
            return None
        if self.tells_ids_alone and finish is None and self.first_token_at is not None and self.stream is not None:
            # As below, where most of it has nothing to do: hundreds of rows come here in every step.
            sample.token_ids += token_ids
            self.stream.put_tokens(index, token_ids, "")
            return None
        if logprobs is not None and len(logprobs) > len(token_ids):
            logprobs = logprobs.part(0, len(token_ids))
        if token_ids and self.first_token_at is None and not self.has_earlier_tokens:
            self.first_token_at = now
        if self.stream is None and finish is None and not self.generation.text.stop:
            # Nobody reads, and no text can end it: a new owner has hundreds to take up before it is ready.
            sample.unread += token_ids
            if token_ids:
                self._tell_prompt()
            self._tell(index, list(token_ids), "", logprobs)
            return None
        self._read_up(sample)
        # The token that ends a sample is no part of its text, unless the client wants to see what stopped it.
        silent_end = finish is FinishReason.STOP and not self._shows_stop_token(matched_token_id)
        piece = sample.detokenizer.push(token_ids[:-1] if silent_end else token_ids)
        count = len(token_ids) if piece.matched_stop is None else piece.num_tokens
        text = piece.text
        if finish is not None and piece.matched_stop is None:
            text += sample.detokenizer.flush()
        if token_ids:
            self._tell_prompt()
        if count or text:
            shown = "" if self.generation.text.skip_text else text
            self._tell(index, list(token_ids[:count]), shown, logprobs.part(0, count) if logprobs is not None else None)
        if piece.matched_stop is not None:
            self._end(index, FinishReason.STOP, matched_stop=piece.matched_stop)
        elif finish is not None:
            self._end(index, finish, matched_token_id=matched_token_id)
        return piece.matched_stop

    def _read_up(self, sample: LiveSample) -> None:
        """Turn into text what came while nobody read."""
        unread, sample.unread = sample.unread, []
        if unread and (text := sample.detokenizer.push(unread).text) and not self.generation.text.skip_text:
            sample.text.append(text)

    def note_prompt(self, first_position: int, columns: Logprobs) -> None:
        """Take what is said of a part of the prompt; what is known already is passed over.

        A request that was moved to another group, or has several samples, may hear of its prompt again.
        """
        known = self.prompt_logprobs
        if known is not None and first_position <= len(known):
            known.extend(columns.part(len(known) - first_position))

    def _tell_prompt(self) -> None:
        """Tell the client of its prompt, once, before the first token."""
        known = self.prompt_logprobs
        if known is None or self.has_told_prompt:
            return
        self.has_told_prompt = True
        num_missing = len(self.generation.prompt_token_ids) - len(known)
        known.extend(Logprobs(known.width, num_unknown=num_missing))  # lost with a group; never shifted
        if self.stream is not None:
            self.stream.put_prompt_logprobs(known)

    def _shows_stop_token(self, token_id: int | None) -> bool:
        sampling, text = self.generation.sampling, self.generation.text
        return token_id in sampling.stop_token_ids and text.include_stop_str_in_output

    def abort(self) -> None:
        """End every sample that still runs with reason abort; its text so far is whole."""
        for index, sample in enumerate(self.samples):
            if sample.reason is None:
                self.abort_sample(index)

    def abort_sample(self, index: int) -> None:
        """End one sample that still runs with reason abort."""
        self._read_up(self.samples[index])
        if (text := self.samples[index].detokenizer.flush()) and not self.generation.text.skip_text:
            self._tell(index, [], text)
        self._end(index, FinishReason.ABORT)

    def close(self, now: float) -> None:
        """Put the last event of a stream whose samples all ended."""
        self._close(
            Done(
                num_prompt_tokens=len(self.generation.prompt_token_ids),
                num_cached_tokens=self.num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
                time_to_first_token_s=self.time_to_first_token_s or 0.0,
                duration_s=now - self.arrived_at,
            )
        )

    def fail(self, error: ManipleError) -> None:
        """End the stream badly."""
        for sample in self.samples:
            sample.reason = sample.reason or FinishReason.ABORT
        self._close(error)

    def _tell(self, index: int, token_ids: list[int], text: str, logprobs: Logprobs | None = None) -> None:
        sample = self.samples[index]
        sample.token_ids += token_ids
        if text:
            sample.text.append(text)
        if sample.logprobs is not None:
            if logprobs is None or len(logprobs) != len(token_ids):
                logprobs = Logprobs(sample.logprobs.width, num_unknown=len(token_ids))
            sample.logprobs.extend(logprobs)
        if self.stream is not None:
            self.stream.put_tokens(index, token_ids, text, logprobs if sample.logprobs is not None else None)

    def _close(self, last: Done | ManipleError) -> None:
        self.last = last
        if self.stream is not None:
            self.stream.close(last)

    def _end(
        self, index: int, reason: FinishReason, *, matched_stop: str | None = None, matched_token_id: int | None = None
    ) -> None:
        sample = self.samples[index]
        sample.reason = reason
        in_eos = matched_token_id in self.generation.sampling.eos_ids
        in_stop = matched_token_id in self.generation.sampling.stop_token_ids
        sample.finished = SampleFinished(
            index=index,
            reason=reason,
            num_output_tokens=sample.num_output_tokens,
            matched_stop=matched_stop,
            matched_token_id=matched_token_id if in_stop or not in_eos else None,
        )
        if self.stream is not None:
            self.stream.put_finished(sample.finished)


def check_right(live: LiveRequest, token: bytes, identity: str) -> None:
    """Raise ``PermissionDenied`` where the token is not this request's, or belongs to another caller."""
    if not live.right.fits(token, identity):
        raise PermissionDenied("resume_token does not give this caller the right to resume this request")


def resumed_stream(live: LiveRequest, token: bytes, identity: str, cursors: Sequence[Cursor]) -> GenerationStream:
    """Return a new stream of ``live`` that goes on after the cursors. Its cancel means nothing yet.

    Raises:
        PermissionDenied: the token is not this request's, or belongs to another caller.
        InvalidParameter, ResumeLost: see ``attach``.
    """
    check_right(live, token, identity)
    stream = GenerationStream(live.generation, lambda: None)
    live.attach(stream, cursors)
    return stream
