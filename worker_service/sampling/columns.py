"""Keep the sampling parameters of all rows: one column per field, and sets of the rows that use a rare one.

A step asks "does any row want this?" of a set that is mostly empty, so that a feature nobody asked for costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service_chassis.protocol.digest import mix
from worker_service.sampling.logprobs import AskedLogprobs
from worker_service.step_work import Bits, RowSampling

GREEDY_BELOW = 1e-5


def allowed(mask: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return [vocab_size] whether a mask allows each id."""
    return np.unpackbits(mask, count=vocab_size, bitorder="little").view(np.bool_)


@dataclass(slots=True)
class PenaltyCounts:
    """What a row's penalties need of its tokens, kept up to date by the tokens that came since."""

    seen: npt.NDArray[np.bool_]  # [vocab_size], in prompt or output
    output_counts: npt.NDArray[np.int32]  # [vocab_size]
    num_counted: int = 0

    def count(self, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Take in the tokens from ``num_counted`` on; ``token_ids`` are all known ones."""
        new = token_ids[self.num_counted :]
        self.seen[new] = True
        output = token_ids[max(self.num_counted, num_prompt_tokens) :]
        np.add.at(self.output_counts, output, 1)
        self.num_counted = len(token_ids)


class SamplingColumns:
    """The sampling parameters of the batch. Owned by the input batch; rows are req_index values."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.min_tokens = np.zeros(max_num_seqs, np.int32)
        self.noise_base = np.zeros(max_num_seqs, np.uint64)  # mix(mix(seed) ^ sample_index)
        self.filters = np.zeros(max_num_seqs, np.bool_)  # top-k, top-p or min-p is on
        # req_index -> what it asked for; absent where it asked for nothing
        self.bias: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        self.forbidden: dict[int, npt.NDArray[np.bool_]] = {}  # [vocab_size], the complement of allowed_token_ids
        self.masks: dict[int, Bits] = {}  # of this step alone
        self.stop_ids: dict[int, npt.NDArray[np.int64]] = {}  # rows with min_tokens
        self.bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.penalties: dict[int, PenaltyCounts] = {}
        self.logprobs: dict[int, AskedLogprobs] = {}

    def add(self, req_index: int, sampling: RowSampling, sample_index: int, *, fork_of: int | None = None) -> None:
        """Enter a row, perhaps one that forks from another. Its values were checked when the delta was accepted."""
        self.remove(req_index)
        self.temperature[req_index] = sampling.temperature
        self.top_p[req_index] = sampling.top_p
        self.top_k[req_index] = sampling.top_k if sampling.top_k < self.vocab_size else 0
        self.min_p[req_index] = sampling.min_p
        self.repetition_penalty[req_index] = sampling.repetition_penalty
        self.presence_penalty[req_index] = sampling.presence_penalty
        self.frequency_penalty[req_index] = sampling.frequency_penalty
        self.min_tokens[req_index] = sampling.min_tokens
        self.noise_base[req_index] = mix(mix(sampling.seed) ^ sample_index)
        self.filters[req_index] = sampling.top_p < 1 or sampling.min_p > 0 or self.top_k[req_index] > 0
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.bias[req_index] = (np.array(ids, np.int64), np.array(values, np.float32))
        if sampling.allowed_token_ids:
            forbidden = np.ones(self.vocab_size, np.bool_)
            forbidden[list(sampling.allowed_token_ids)] = False
            self.forbidden[req_index] = forbidden
        if sampling.min_tokens > 0 and sampling.stop_ids:
            self.stop_ids[req_index] = np.array(sampling.stop_ids, np.int64)
        if sampling.bad_words:
            self.bad_words[req_index] = sampling.bad_words
        if (logprobs := AskedLogprobs.of(sampling)) is not None:
            self.logprobs[req_index] = logprobs
            if fork_of is not None:
                logprobs.num_prompt_told = self.logprobs[fork_of].num_prompt_told  # their prompt is one
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            self.penalties[req_index] = PenaltyCounts(
                np.zeros(self.vocab_size, np.bool_), np.zeros(self.vocab_size, np.int32)
            )

    def remove(self, req_index: int) -> None:
        """Forget a row's rare parameters; its columns are overwritten by the next row."""
        self.logprobs.pop(req_index, None)
        for asked in (self.bias, self.forbidden, self.stop_ids, self.bad_words, self.penalties):
            asked.pop(req_index, None)

    def clear(self) -> None:
        """Forget all rows."""
        self.logprobs.clear()
        for asked in (self.bias, self.forbidden, self.stop_ids, self.bad_words, self.penalties):
            asked.clear()

    def adjusted(self, rows: Iterable[int]) -> list[tuple[int, int]]:
        """Return (place in ``rows``, req_index) of the rows whose logits change before temperature."""
        asked = self.bias.keys() | self.forbidden.keys() | self.stop_ids.keys() | self.masks.keys()
        asked |= self.bad_words.keys() | self.penalties.keys()
        return [(place, row) for place, row in enumerate(rows) if row in asked] if asked else []
