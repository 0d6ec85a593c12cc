"""Report log-probabilities: of sampled tokens, and of the tokens of a prompt.

Without torch, so that the scripted model uses it too: what computes on scores is passed in, ``report_arrays`` here or
``report_tensors`` of ``tensor_logprobs``. Only rows that asked pay, and what a row gets follows from its own scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from service_chassis.protocol.logprobs import Logprobs
from worker_service.process_group import Bytes
from worker_service.step_work import (
    PROCESSED_LOGPROBS,
    RAW_LOGITS,
    RAW_LOGPROBS,
    Int32Array,
    RowLogprobs,
    RowSampling,
    StepWork,
)

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

# Positions of a prompt whose scores exist at the same time. Products of so many rows are about as fast as larger ones.
PROMPT_SLICE = 64


class ScoreReport(NamedTuple):
    """What is said of some tokens, each under a row of scores of its own."""

    token_ids: Int32Array  # [num_rows, k + 1], the token itself, then the likeliest; of equals the lower id first
    values: Float32Array  # [num_rows, k + 1]
    ranks: Int32Array  # [num_rows], 1 is the likeliest

    def columns(self, start: int, stop: int, num_likeliest: int) -> Logprobs:
        """Return some rows with fewer of the likeliest."""
        width = num_likeliest + 1
        return Logprobs(
            width,
            self.token_ids[start:stop, :width].tobytes(),
            self.values[start:stop, :width].tobytes(),
            self.ranks[start:stop].tobytes(),
        )


# Called with scores [num_rows, vocab_size], tokens [num_rows], k, and whether to report log-softmax or the scores.
Report = Callable[[Any, Int32Array, int, bool], ScoreReport]


@dataclass(slots=True)
class AskedLogprobs:
    """What one row asked for."""

    num_output: int | None  # likeliest besides the sampled token; None: nothing
    num_prompt: int | None
    mode: int
    num_prompt_told: int = 1  # leading positions of its prompt that need not be told; nothing precedes the first

    @classmethod
    def of(cls, sampling: RowSampling) -> AskedLogprobs | None:
        """Return what a row asks for; None if nothing."""
        if sampling.num_logprobs is None and sampling.num_prompt_logprobs is None:
            return None
        return cls(sampling.num_logprobs, sampling.num_prompt_logprobs, sampling.logprobs_mode or RAW_LOGPROBS)


class OutputLogprobs:
    """Those of one step's sampled tokens: scores are noted on the way, and reported on once tokens are chosen."""

    def __init__(self, asked: Mapping[int, AskedLogprobs], rows: Int32Array) -> None:
        """Find who asked among ``rows``, req_index values in the order of the scores."""
        self.shapes: list[tuple[int, int, int]] = []  # (place in ``rows``, req_index, likeliest), in order
        self._asked: dict[int, list[tuple[int, int, int]]] = {}  # mode -> (place in ``rows``, req_index, likeliest)
        self._noted: dict[int, Any] = {}  # mode -> [num_places, vocab_size]
        for place, row in enumerate(rows.tolist()) if asked else ():
            one = asked.get(row)
            if one is not None and one.num_output is not None:
                self.shapes.append((place, row, one.num_output))
                self._asked.setdefault(one.mode, []).append((place, row, one.num_output))

    def __bool__(self) -> bool:
        return bool(self.shapes)

    def note_raw(self, scores: Any) -> None:
        """Take what the model computed, before anything changes it."""
        self._note(scores, (RAW_LOGPROBS, RAW_LOGITS))

    def note_processed(self, scores: Any) -> None:
        """Take the scores behind penalties, bias and masks, before temperature."""
        self._note(scores, (PROCESSED_LOGPROBS,))

    def _note(self, scores: Any, modes: Iterable[int]) -> None:
        for mode in modes:
            if (asked := self._asked.get(mode)) is not None:
                self._noted[mode] = scores[[place for place, _, _ in asked]]  # a copy

    def take(self, chosen: Int32Array, report: Report) -> dict[int, Logprobs]:
        """Return req_index -> one position, for all of ``shapes``.

        ``chosen`` are the tokens of all rows; below 0 a row has none, and what is returned for it means nothing.
        """
        found: dict[int, Logprobs] = {}
        for mode, asked in self._asked.items():
            tokens = np.maximum(chosen[[place for place, _, _ in asked]], 0)
            most = max(count for _, _, count in asked)
            said = report(self._noted[mode], tokens, most, mode != RAW_LOGITS)
            for index, (_, row, count) in enumerate(asked):
                found[row] = said.columns(index, index + 1, count)
        return found


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions of one prompt that a step has scores for: those of the token before each."""

    req_index: int
    first_position: int
    count: int
    first_place: int  # of the step's tokens: the one before ``first_position``
    num_likeliest: int
    mode: int

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield [start, stop) of parts that are computed at once."""
        for start in range(0, self.count, PROMPT_SLICE):
            yield start, min(start + PROMPT_SLICE, self.count)


def prompt_spans(asked: Mapping[int, AskedLogprobs], work: StepWork, num_prompt_tokens: Int32Array) -> list[PromptSpan]:
    """Say which positions of prompts are told with a step, and count them as told.

    A position is told once for every row: one that is preempted computes its prompt again in silence.
    """
    if not asked:
        return []
    spans: list[PromptSpan] = []
    place = 0
    counts = zip(work.rows.tolist(), work.num_computed_tokens.tolist(), work.num_scheduled_tokens.tolist(), strict=True)
    for row, num_computed, num_scheduled in counts:
        one = asked.get(row)
        if one is not None and one.num_prompt is not None:
            first = max(num_computed + 1, one.num_prompt_told)
            count = min(num_computed + num_scheduled + 1, int(num_prompt_tokens[row])) - first
            if count > 0:
                spans.append(PromptSpan(row, first, count, place + first - 1 - num_computed, one.num_prompt, one.mode))
                one.num_prompt_told = first + count
        place += num_scheduled
    return spans


class StepLogprobs:
    """What a step tells: which rows, and how much of it, follows on every rank from the batch alone."""

    def __init__(self, asked: Mapping[int, AskedLogprobs], work: StepWork, num_prompt_tokens: Int32Array) -> None:
        """See who asked; what is told of prompts counts as told from now on."""
        self._num_rows = int(np.count_nonzero(work.samples))
        self.output = OutputLogprobs(asked, work.rows[work.samples])
        self.spans = prompt_spans(asked, work, num_prompt_tokens)

    def to_bytes(
        self,
        token_ids: Int32Array,
        sampled: Mapping[int, Logprobs],
        prompts: list[Logprobs],
        num_tokens: Int32Array | None = None,
    ) -> bytes:
        """Write down what the output rank decided.

        Args:
            token_ids: of the rows that sample.
            sampled: req_index -> of its tokens, for all of ``output``.
            prompts: of ``spans``, in order.
            num_tokens: of ``token_ids``, for each of the rows; None: one each.
        """
        told = [*(sampled[row] for _, row, _ in self.output.shapes), *prompts]
        counts = num_tokens.tobytes() if num_tokens is not None else b""
        return counts + token_ids.tobytes() + b"".join(columns.to_bytes() for columns in told)

    def from_bytes(self, raw: Bytes) -> tuple[Int32Array, tuple[RowLogprobs, ...]]:
        """Read what ``to_bytes`` wrote without counts, there or here."""
        token_ids = np.frombuffer(raw, np.int32, self._num_rows)
        if not self.output and not self.spans:
            return token_ids, ()
        return token_ids, self._told(raw, token_ids.nbytes, token_ids, np.ones(self._num_rows, np.int32))

    def several_from_bytes(self, raw: Bytes) -> tuple[Int32Array, Int32Array, tuple[RowLogprobs, ...]]:
        """Read what ``to_bytes`` wrote with counts; return tokens, counts and the rest."""
        num_tokens = np.frombuffer(raw, np.int32, self._num_rows)
        token_ids = np.frombuffer(raw, np.int32, int(num_tokens.sum()), num_tokens.nbytes)
        told = self._told(raw, num_tokens.nbytes + token_ids.nbytes, token_ids, num_tokens)
        return token_ids, num_tokens, told

    def _told(self, raw: Bytes, start: int, token_ids: Int32Array, num_tokens: Int32Array) -> tuple[RowLogprobs, ...]:
        reader = _Reader(raw, start)
        firsts = np.cumsum(num_tokens) - num_tokens
        of_output: dict[int, Logprobs] = {}
        for place, row, num_likeliest in self.output.shapes:
            columns = reader.take(int(num_tokens[place]), num_likeliest)
            if token_ids[firsts[place]] >= 0:  # else the row got none
                of_output[row] = columns
        of_prompt = {span.req_index: (reader.take(span.count, span.num_likeliest), span) for span in self.spans}
        told = []
        for row in sorted(of_output.keys() | of_prompt.keys()):
            prompt, span = of_prompt.get(row, (None, None))
            told.append(RowLogprobs(row, of_output.get(row), prompt, span.first_position if span is not None else 0))
        return tuple(told)


class _Reader:
    def __init__(self, raw: Bytes, start: int) -> None:
        self._raw = memoryview(raw)
        self._at = start

    def take(self, num_positions: int, num_likeliest: int) -> Logprobs:
        start, width = self._at, num_likeliest + 1
        self._at += Logprobs.size_of(num_positions, width)
        return Logprobs.from_bytes(bytes(self._raw[start : self._at]), width)


def report_arrays(scores: Float32Array, tokens: Int32Array, num_likeliest: int, normalize: bool) -> ScoreReport:
    """Report on arrays. See ``Report``."""
    rows = np.arange(len(scores))
    own = scores[rows, tokens][:, None]
    ranks = 1 + (scores > own).sum(axis=1)
    ranks += ((scores == own) & (np.arange(scores.shape[1]) < tokens[:, None])).sum(axis=1)
    ids = tokens[:, None]
    if num_likeliest:
        least = np.partition(scores, -num_likeliest, axis=1)[:, -num_likeliest, None]
        places, candidates = np.nonzero(scores >= least)
        ids = np.concatenate(
            [ids, first_of_each(places, candidates, scores[places, candidates], num_likeliest)], axis=1
        )
    values = scores[rows[:, None], ids]
    if normalize:
        # A masked row with nothing left has no distribution: all of it is as impossible as before.
        highest = np.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float32).min)
        total = np.exp(scores - highest).sum(axis=1, keepdims=True)
        values = values - highest - np.log(np.maximum(total, np.finfo(np.float32).tiny))
    return ScoreReport(ids.astype(np.int32), values.astype(np.float32), ranks.astype(np.int32))


def first_of_each(places: Int64Array, ids: Int64Array, scores: Float32Array, count: int) -> Int64Array:
    """Return the ``count`` likeliest of each row.

    Args:
        places: [num_candidates] row of each candidate, ascending; every row has at least ``count``.
        ids: [num_candidates] token ids, ascending within a row.
        scores: [num_candidates].
        count: wanted.
    Returns:
        [num_rows, count] ids, the likeliest first; of equals the lower.
    """
    order = np.lexsort((ids, -scores, places))
    starts = np.searchsorted(places, np.arange(places[-1] + 1))
    first: Int64Array = ids[order[starts[:, None] + np.arange(count)]]
    return first
