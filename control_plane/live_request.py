"""One admitted generation in the engine: its stream, the text side of its samples, and what the log says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.generation import Done, FinishReason, Generation, SampleFinished, Started
from control_plane.generation_stream import GenerationStream
from control_plane.text.detokenizer import Detokenizer
from control_plane.text.tokenizer import Tokenizer
from service_chassis.errors import ManipleError


@dataclass(slots=True)
class LiveSample:
    """One sample. ``reason`` is set once, by whichever rule came first in its output."""

    text: Detokenizer
    num_output_tokens: int = 0
    reason: FinishReason | None = None


@dataclass(slots=True)
class LiveRequest:
    """What the engine keeps of a request until its last event. Owned by the engine's loop."""

    generation: Generation
    stream: GenerationStream
    arrived_at: float
    samples: list[LiveSample] = field(default_factory=list)
    started_at: float | None = None  # entered its first delta
    first_token_at: float | None = None
    num_cached_tokens: int = 0
    num_losses: int = 0  # of groups that were computing it

    @classmethod
    def of(cls, generation: Generation, stream: GenerationStream, tokenizer: Tokenizer, now: float) -> LiveRequest:
        """Take a generation in."""
        samples = [
            LiveSample(
                Detokenizer(
                    tokenizer,
                    generation.text,
                    prompt_token_ids=generation.prompt_token_ids,
                    min_tokens=generation.sampling.min_tokens,
                )
            )
            for _ in range(generation.sampling.n)
        ]
        return cls(generation, stream, now, samples)

    @property
    def is_over(self) -> bool:
        """Whether every sample ended."""
        return all(sample.reason is not None for sample in self.samples)

    @property
    def num_output_tokens(self) -> int:
        return sum(sample.num_output_tokens for sample in self.samples)

    def start(self, num_cached_tokens: int, now: float) -> None:
        """Tell the client that its request entered a delta."""
        self.started_at = now
        self.num_cached_tokens = num_cached_tokens
        self.stream.put_started(
            Started(
                request_id=self.generation.request_id,
                resume_token="",
                num_prompt_tokens=len(self.generation.prompt_token_ids),
                num_cached_tokens=num_cached_tokens,
            )
        )

    def push(
        self,
        index: int,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        matched_token_id: int | None,
        now: float,
    ) -> str | None:
        """Turn new tokens of one sample into events.

        Args:
            index: the sample.
            token_ids: new ids, up to and including one that ended the sample.
            finish: set if the token rules ended the sample with the last of ``token_ids``.
            matched_token_id: the stop id, with ``finish`` STOP.
            now: the engine's time.
        Returns:
            The stop string if one ended the sample here, before the token rules did.
        """
        sample = self.samples[index]
        if sample.reason is not None:
            return None
        if token_ids and self.first_token_at is None:
            self.first_token_at = now
        # The token that ends a sample is no part of its text, unless the client wants to see what stopped it.
        silent_end = finish is FinishReason.STOP and not self._shows_stop_token(matched_token_id)
        piece = sample.text.push(token_ids[:-1] if silent_end else token_ids)
        count = len(token_ids) if piece.matched_stop is None else piece.num_tokens
        sample.num_output_tokens += count
        text = piece.text
        if finish is not None and piece.matched_stop is None:
            text += sample.text.flush()
        if count or text:
            self.stream.put_tokens(index, list(token_ids[:count]), "" if self.generation.text.skip_text else text)
        if piece.matched_stop is not None:
            self._end(index, FinishReason.STOP, matched_stop=piece.matched_stop)
        elif finish is not None:
            self._end(index, finish, matched_token_id=matched_token_id)
        return piece.matched_stop

    def _shows_stop_token(self, token_id: int | None) -> bool:
        sampling, text = self.generation.sampling, self.generation.text
        return token_id in sampling.stop_token_ids and text.include_stop_str_in_output

    def abort(self) -> None:
        """End every sample that still runs with reason abort; its text so far is whole."""
        for index, sample in enumerate(self.samples):
            if sample.reason is None:
                if (text := sample.text.flush()) and not self.generation.text.skip_text:
                    self.stream.put_tokens(index, [], text)
                self._end(index, FinishReason.ABORT)

    def close(self, now: float) -> None:
        """Put the last event of a stream whose samples all ended."""
        first = self.first_token_at if self.first_token_at is not None else now
        self.stream.close(
            Done(
                num_prompt_tokens=len(self.generation.prompt_token_ids),
                num_cached_tokens=self.num_cached_tokens,
                num_output_tokens=self.num_output_tokens,
                time_to_first_token_s=first - self.arrived_at,
                duration_s=now - self.arrived_at,
            )
        )

    def fail(self, error: ManipleError) -> None:
        """End the stream badly."""
        for sample in self.samples:
            sample.reason = sample.reason or FinishReason.ABORT
        self.stream.close(error)

    def _end(
        self, index: int, reason: FinishReason, *, matched_stop: str | None = None, matched_token_id: int | None = None
    ) -> None:
        sample = self.samples[index]
        sample.reason = reason
        in_eos = matched_token_id in self.generation.sampling.eos_ids
        in_stop = matched_token_id in self.generation.sampling.stop_token_ids
        self.stream.put_finished(
            SampleFinished(
                index=index,
                reason=reason,
                num_output_tokens=sample.num_output_tokens,
                matched_stop=matched_stop,
                matched_token_id=matched_token_id if in_stop or not in_eos else None,
            )
        )
