"""Sample the scripted model's rows without torch: greedy, or a seeded draw without filters.

The noise is the protocol's, so a row gets what the real sampler would draw, but for the last bit of a logarithm. Which
of the two samples a row follows from the row alone, so its tokens do not depend on its mates.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from service_chassis.protocol.arrays import gumbel_array, noise_bits_array
from worker_service.sampling.columns import GREEDY_BELOW, SamplingColumns, allowed
from worker_service.sampling.logprobs import OutputLogprobs
from worker_service.sampling.noise_keys import noise_keys
from worker_service.step_work import Int32Array, RowSampling

Float32Array = npt.NDArray[np.float32]


def needs_full_sampler(sampling: RowSampling) -> bool:
    """Say whether a row asks for more than is served here."""
    filters = (sampling.top_p, sampling.top_k, sampling.min_p)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return bool(
        (sampling.temperature >= GREEDY_BELOW and filters != (1.0, 0, 0.0))
        or penalties != (1.0, 0.0, 0.0)
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
    )


def sample_plainly(
    logits: Float32Array,
    rows: Int32Array,
    positions: Int32Array,
    num_prompt_tokens: Int32Array,
    columns: SamplingColumns,
    noting: OutputLogprobs | None = None,
) -> Int32Array:
    """Choose the next token of rows for which ``needs_full_sampler`` is false.

    Args:
        logits: [num_rows, vocab_size]; is changed.
        rows: [num_rows] req_index values.
        positions: [num_rows] positions that the sampled tokens will have.
        num_prompt_tokens: [num_rows].
        columns: parameters by req_index.
        noting: told of the scores on their way, where some row wants log-probabilities.
    Returns:
        [num_rows] token ids; the lowest where several scores are highest.
    """
    if noting is not None:
        noting.note_raw(logits)
    for place, row in enumerate(rows.tolist()):
        stop_ids = columns.stop_ids.get(row)
        if stop_ids is not None and positions[place] - num_prompt_tokens[place] < columns.min_tokens[row]:
            logits[place, stop_ids] = -np.inf
        if (mask := columns.masks.get(row)) is not None:
            logits[place, ~allowed(mask, logits.shape[1])] = -np.inf
    if noting is not None:
        noting.note_processed(logits)
    drawn = np.flatnonzero(columns.temperature[rows] >= GREEDY_BELOW)
    ids = np.arange(logits.shape[1], dtype=np.uint32)
    keys = noise_keys(columns.noise_base[rows[drawn]], positions[drawn])
    for place, (k0, k1) in zip(drawn.tolist(), keys.tolist(), strict=True):
        logits[place] /= columns.temperature[rows[place]]
        logits[place] += gumbel_array(noise_bits_array(k0, k1, ids))
    chosen: Int32Array = logits.argmax(axis=1).astype(np.int32)
    return chosen
