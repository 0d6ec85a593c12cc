"""Choose the next token of each row from its logits.

Order: bias, allowed ids, bad words, ``min_tokens``, penalties, the mask of a grammar; then greedy rows take the highest
score, and the others divide by temperature, filter by top-k, top-p and min-p, add the protocol's noise and take the
highest. Ties go to the lowest id. Whatever a row computes depends on that row alone, never on its mates: rules (a) and
(b) of docs/equality.md rest on it.

Runs on the host. Logits of another device are brought over, for greedy rows only the winners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maniple_kernels.argmax import finite_argmax
from maniple_kernels.gumbel import gumbel_argmax, gumbel_noise
from worker_service.sampling.columns import GREEDY_BELOW, SamplingColumns, allowed
from worker_service.sampling.logprobs import OutputLogprobs
from worker_service.sampling.noise_keys import noise_keys

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

# So many of the highest scores are sorted first in a top-p row; nearly always they reach top_p.
_LIKELIEST = 512
# Half of what float32 holds, so that what is added afterwards does not overflow.
_HIGHEST = np.finfo(np.float32).max / 2


class NonFiniteLogits(Exception):
    """The model computed NaN or an infinity: what would be sampled from that is no output of it."""


def check_finite(logits: Tensor, what: Callable[[int], str]) -> None:
    """Raise ``NonFiniteLogits`` if some row of ``logits`` holds NaN or an infinity; ``what`` names the first.

    A sum is not finite if a term is not. It may also overflow where all are, so rows that look bad are looked at again.
    """
    suspects = (~torch.isfinite(logits.sum(dim=-1))).nonzero().flatten().tolist()
    for place in suspects:
        if not bool(torch.isfinite(logits[place]).all()):
            raise NonFiniteLogits(f"the model's logits are not finite: {what(place)}")


class KnownTokens(Protocol):
    """What the sampler reads of the batch."""

    sampling: SamplingColumns
    token_ids: Int32Array  # [max_num_seqs, max_model_len]
    num_tokens: Int32Array  # [max_num_seqs], known
    num_prompt_tokens: Int32Array  # [max_num_seqs]


class Sampler:
    """Samples one token for each of some rows of one batch."""

    def __init__(self, batch: KnownTokens) -> None:
        self._batch = batch

    def sample(self, logits: Tensor, rows: Int32Array, noting: OutputLogprobs | None = None) -> Int32Array:
        """Choose the token that follows the known ones of each row.

        Args:
            logits: [num_rows, vocab_size] float32; may be changed.
            rows: [num_rows] req_index values.
            noting: told of the scores on their way, where some row wants log-probabilities.
        Returns:
            [num_rows] int32 token ids. Nothing is appended to the batch.

        Raises:
            NonFiniteLogits: a row holds NaN or an infinity.
        """
        highest = finite_argmax(logits) if logits.device.type == "cpu" else None
        if highest is None or (highest < 0).any():
            check_finite(logits, lambda place: f"row {rows[place]}, position {self._batch.num_tokens[rows[place]]}")
        if noting is not None:
            noting.note_raw(logits)
        columns = self._batch.sampling
        adjusted = columns.adjusted(rows.tolist())
        drawn = np.flatnonzero(columns.temperature[rows] >= GREEDY_BELOW)
        if adjusted or len(drawn):
            logits = logits.cpu()  # the same tensor where it lies there already
        for place, row in adjusted:
            self._adjust(logits[place].numpy(), row)
        if noting is not None:
            noting.note_processed(logits)
        if len(drawn) == 0:
            return self._greedy(logits) if adjusted or highest is None else highest
        chosen = np.empty(len(rows), np.int32)
        if len(drawn) < len(rows):
            greedy = np.flatnonzero(columns.temperature[rows] < GREEDY_BELOW)
            chosen[greedy] = self._greedy(logits[torch.from_numpy(greedy)])
        chosen[drawn] = self._draw(logits if len(drawn) == len(rows) else logits[torch.from_numpy(drawn)], rows[drawn])
        return chosen

    def warm_up(self, logits: Tensor) -> None:
        """Run what is compiled at its first use."""
        logits.argmax(dim=-1)
        gumbel_argmax(logits.cpu().contiguous(), np.zeros((len(logits), 2), np.uint32))

    @staticmethod
    def _greedy(logits: Tensor) -> Int32Array:
        return logits.argmax(dim=-1).to(torch.int32).cpu().numpy()  # torch returns the first of equals

    def _draw(self, logits: Tensor, rows: Int32Array) -> Int32Array:
        columns = self._batch.sampling
        keys = noise_keys(columns.noise_base[rows], self._batch.num_tokens[rows])
        logits.div_(torch.from_numpy(columns.temperature[rows])[:, None])
        filtered = columns.filters[rows]
        if not filtered.any():
            return gumbel_argmax(logits.contiguous(), keys)
        chosen = np.empty(len(rows), np.int32)
        plain = np.flatnonzero(~filtered)
        if len(plain):
            chosen[plain] = gumbel_argmax(logits[torch.from_numpy(plain)], keys[plain])
        for place in np.flatnonzero(filtered).tolist():
            row, scores = rows[place], logits[place].numpy()
            ids = kept_ids(scores, int(columns.top_k[row]), float(columns.top_p[row]), float(columns.min_p[row]))
            noise = gumbel_noise(int(keys[place, 0]), int(keys[place, 1]), ids)
            chosen[place] = ids[np.argmax(scores[ids] + noise)]
        return chosen

    def _adjust(self, scores: FloatArray, row: int) -> None:
        """Change the scores of one row in place."""
        columns = self._batch.sampling
        num_tokens = int(self._batch.num_tokens[row])
        num_prompt_tokens = int(self._batch.num_prompt_tokens[row])
        known = self._batch.token_ids[row, :num_tokens]
        if (bias := columns.bias.get(row)) is not None:
            scores[bias[0]] += bias[1]
        if (forbidden := columns.forbidden.get(row)) is not None:
            scores[forbidden] = -np.inf
        if (bad_words := columns.bad_words.get(row)) is not None:
            for word in bad_words:
                if ends_with(known[num_prompt_tokens:], word[:-1]):
                    scores[word[-1]] = -np.inf
        stop_ids = columns.stop_ids.get(row)
        if stop_ids is not None and num_tokens - num_prompt_tokens < columns.min_tokens[row]:
            scores[stop_ids] = -np.inf
        if (counts := columns.penalties.get(row)) is not None:
            counts.count(known, num_prompt_tokens)
            repetition = columns.repetition_penalty[row]
            if repetition != 1:
                seen = scores[counts.seen]
                with np.errstate(over="ignore"):
                    penalized = np.where(seen > 0, seen / repetition, seen * repetition)
                # No further than scores go: an infinity beside another is NaN once something is taken away.
                scores[counts.seen] = np.where(np.isfinite(seen), np.clip(penalized, -_HIGHEST, _HIGHEST), seen)
            scores -= columns.frequency_penalty[row] * counts.output_counts
            scores -= columns.presence_penalty[row] * (counts.output_counts > 0)
        if (mask := columns.masks.get(row)) is not None:
            scores[~allowed(mask, len(scores))] = -np.inf


def ends_with(token_ids: Int32Array, word: tuple[int, ...]) -> bool:
    """Say whether the last ids are those of ``word``; the empty word always is."""
    start = len(token_ids) - len(word)
    return start >= 0 and token_ids[start:].tolist() == list(word)


def kept_ids(scores: FloatArray, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.int64]:
    """Return the ids that top-k, top-p and min-p leave, ascending; at least the likeliest.

    Args:
        scores: [vocab_size], divided by temperature; -inf is never kept.
        top_k: keep the k highest, and what equals the last of them; 0 is off.
        top_p: keep the smallest set of the likeliest whose share of what top-k left reaches it; 1 is off.
        min_p: keep what is at least so likely as this times the likeliest; 0 is off.
    """
    if top_k > 0:
        least = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        ids = np.flatnonzero((scores >= least) & (scores > -np.inf))
    else:
        ids = np.flatnonzero(scores > -np.inf)
    if len(ids) == 0:
        return np.zeros(1, np.int64)  # everything is masked: as greedy, the lowest id
    left = scores[ids]
    top = left.max()
    if top_p < 1:
        nucleus = _nucleus(np.exp(left - top), top_p)
        ids, left = ids[nucleus], left[nucleus]
    if min_p > 0:
        ids = ids[left >= top + np.log(min_p)]
    return ids


def _nucleus(weights: FloatArray, top_p: float) -> npt.NDArray[np.int64]:
    """Return the places, ascending, of the likeliest whose share reaches ``top_p``; of equals the lower first."""
    wanted = top_p * weights.sum(dtype=np.float64)
    candidates = np.arange(len(weights))
    if len(weights) > 2 * _LIKELIEST:
        least = np.partition(weights, len(weights) - _LIKELIEST)[len(weights) - _LIKELIEST]
        likeliest = np.flatnonzero(weights >= least)
        if weights[likeliest].sum(dtype=np.float64) >= wanted:
            candidates = likeliest
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    reached = np.cumsum(weights[order], dtype=np.float64)
    count = int(np.searchsorted(reached, wanted)) + 1  # the first place where it is reached
    return np.sort(order[:count])
