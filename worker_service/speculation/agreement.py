"""Have the output rank sample a step in which tokens were tried ahead, and tell the others, who keep it all too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from service_chassis.protocol.logprobs import Logprobs
from worker_service.process_group import OUTPUT_RANK, ProcessGroup
from worker_service.sampling.logprobs import StepLogprobs
from worker_service.sampling.masked_rows import MaskedRows, of_sampled
from worker_service.speculation.acceptance import Int64Array, append_sampled, num_scores_of, sample_tries
from worker_service.speculation.tries import TokenTable
from worker_service.step_work import Int32Array, RowLogprobs, StepWork

# Given places among the scores and their rows, returns a token for each, and what is told of those that asked.
SampleAt = Callable[[Int64Array, Int32Array], tuple[Int32Array, dict[int, Logprobs]]]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What was sampled, in the terms of ``StepOutput``."""

    token_ids: Int32Array
    num_tokens: Int32Array
    logprobs: tuple[RowLogprobs, ...]


def agree_on_tries(
    work: StepWork,
    batch: TokenTable,
    masked: MaskedRows,
    telling: StepLogprobs,
    prompts: list[Logprobs],
    group: ProcessGroup,
    *,
    sample: SampleAt,
    append: Callable[[Int32Array, Int32Array], None],
) -> Agreed:
    """Sample on the output rank, append on every rank.

    Args:
        work: as ``with_tries`` returned it, with rows that try.
        batch: of this rank.
        masked: whose masks have come; some of the rows may be under one, and try nothing.
        telling: of ``work``.
        prompts: of ``telling.spans``, on the output rank.
        group: all ranks of it call this.
        sample: is called on the output rank alone.
        append: makes a token of each of some rows known.
    """
    rows = work.rows[work.samples]
    own = b""
    if group.rank == OUTPUT_RANK:
        told: dict[int, Logprobs] = {}

        def sample_some(places: Int64Array, here: Int32Array) -> Int32Array:
            token_ids, of_tokens = sample(places, here)
            for row, columns in of_tokens.items():
                told.setdefault(row, Logprobs(columns.width)).extend(columns)
            return masked.decide(here, token_ids)

        token_ids, num_tokens = sample_tries(rows, num_scores_of(work), batch, sample_some, append)
        own = telling.to_bytes(token_ids, told, prompts, num_tokens)
    token_ids, num_tokens, logprobs = telling.several_from_bytes(group.broadcast(own))
    if group.rank != OUTPUT_RANK:
        append_sampled(rows, token_ids, num_tokens, append)
    of_each = np.repeat(rows, num_tokens)
    masked.follow(of_each, token_ids)
    return Agreed(token_ids, num_tokens, of_sampled(of_each, token_ids, logprobs))
