"""Say what a batch was that another owner left running, so that a scheduler goes on where it stood.

Ranks know rows: tokens, tables, counts. What a sample is in the terms of a scheduler follows from that and from its
request's rules. Tokens may go past the end of a sample, since a dead owner had steps in flight when it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.scheduling.request import FinishReason, Request, SampleState
from service_chassis.ids import BlockId, ReqIndex, RowKey

# What a row can be doing.
ROW_STATES = (SampleState.PREFILL, SampleState.DECODE, SampleState.PREEMPTED)


class SampleEnd(NamedTuple):
    """Where a sample ended by its own rules."""

    reason: FinishReason
    num_output_tokens: int  # that count
    matched_token_id: int | None = None  # the stop id, with STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedRow:
    """A sample that has a row. Its output is in the request's ``outputs``."""

    sample_index: int
    state: SampleState  # one of ROW_STATES
    req_index: ReqIndex
    row_key: RowKey
    block_ids: tuple[BlockId, ...]
    num_computed_tokens: int
    end: SampleEnd | None = None  # it is over: the next delta says so
    is_void: bool = False  # its mask died with its owner: it has computed padding past what it knows


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedRequest:
    """A request with at least one row. Samples without a row ended (``outputs`` has None) or did not begin."""

    request: Request  # with ``outputs``: all known output tokens of every sample
    rows: tuple[AdoptedRow, ...]


def first_end(request: Request, output_ids: Sequence[int], limit: int) -> SampleEnd | None:
    """Apply the token rules to an output from its first token on, as ``Scheduler.apply`` does one by one.

    Args:
        request: its rules.
        output_ids: all output tokens that are known.
        limit: known tokens, prompt included, at which a sample ends.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens + len(output_ids) < limit and request.stop_ids.isdisjoint(output_ids):
        return None  # most end nowhere, and have thousands
    for count, token_id in enumerate(output_ids, start=1):
        if token_id in request.stop_ids and count > request.min_tokens:
            return SampleEnd(FinishReason.STOP, count, token_id)
        if num_prompt_tokens + count == limit:
            return SampleEnd(FinishReason.LENGTH, count)
    return None


def prompt_is_done(adopted: AdoptedRequest) -> bool:
    """Say whether the first sample got through the prompt, or ended."""
    first = next((row for row in adopted.rows if row.sample_index == 0), None)
    outputs = adopted.request.outputs
    if first is None:
        return outputs[0] is None
    return first.state is SampleState.DECODE or bool(outputs[0])
