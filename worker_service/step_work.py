"""What one accepted delta means for the device: the value that batch_state hands to the device thread.

Index spaces: ``req_index`` names a row of every persistent table; arrays called ``rows`` hold req_index values in
ascending order. No torch, no grpc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from service_chassis.protocol.logprobs import Logprobs

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint8]  # one bit a token id, the lowest first

# In place of a token: the row had none to give, since its mask died with its owner.
NOT_SAMPLED = -1


# LogprobsMode of sampling.proto.
RAW_LOGPROBS, RAW_LOGITS, PROCESSED_LOGPROBS = 1, 2, 3


class Mode(Enum):
    RUN = 1
    APPLY_ONLY = 2
    DUMMY = 3


class TableOp(Enum):
    APPEND = 1
    REPLACE = 2
    DROP_LEADING = 3
    STATE_SLOT = 4


@dataclass(frozen=True, slots=True)
class TableChange:
    """A change of one row's block table in one KV group, in the order to apply."""

    req_index: int
    kv_group: int
    op: TableOp
    block_ids: tuple[int, ...] = ()  # APPEND, REPLACE
    value: int = 0  # DROP_LEADING: entries; STATE_SLOT: the slot


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to sample one row: RowSampling of sampling.proto as plain values, see there for ranges."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    logprobs_mode: int = 0  # of LogprobsMode


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a row that samples nothing becomes a vector."""

    is_mean: bool  # of all its tokens' hidden states; else the last token's
    normalize: bool


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that enters. Its tables follow in ``StepWork.table_changes``."""

    req_index: int
    row_key: int
    request_id: str
    sample_index: int
    token_ids: Int32Array  # all known tokens; empty with fork_of
    num_prompt_tokens: int
    num_computed_tokens: int
    num_prefill_tokens: int
    sampling: RowSampling
    fork_of: int | None = None  # copy the first num_prefill_tokens known tokens of that row
    cache_namespace: bytes = b""
    control_blob: bytes = b""
    lora_slot: int = 0
    pooling: Pooling | None = None  # set: it ends with a vector


@dataclass(frozen=True, slots=True)
class FinishedRow:
    req_index: int
    reason: int  # RowFinished.Reason
    num_tokens: int  # prompt and output tokens that count


@dataclass(frozen=True, slots=True)
class ResumedRow:
    """A preempted row that gets blocks again, by a table change in the same work."""

    req_index: int
    num_computed_tokens: int  # found in the prefix cache
    num_prefill_tokens: int  # known to its owner, all to be computed again


class MaskGate(Protocol):
    """What the sampling of a step waits for."""

    def wait(self) -> Mapping[int, Bits] | None:
        """Block until it is there: req_index -> mask, or None where there will be none."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a step has to do with tokens tried ahead (PROTOCOL B11)."""

    rows: tuple[int, ...]  # ascending; each may try one less than its scheduled tokens
    settled: tuple[int, ...]  # rows that did in an earlier step, and compute: what was accepted then is said by now
    prompt_lookup_min: int
    prompt_lookup_max: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step, ready for the device thread, which applies it in the order of the fields and then computes.

    ``rows``, ``num_computed_tokens`` and ``num_scheduled_tokens`` run in parallel and name the rows that compute in
    this step: row ``rows[i]`` computes positions ``[num_computed_tokens[i], num_computed_tokens[i] +
    num_scheduled_tokens[i])``. ``samples[i]`` says whether it samples one token at the end of that; a row of
    ``speculation`` samples at each of them, for as long as what it tried is what it sampled.
    Immutable; arrays may be shared between steps and are never written.
    """

    step: int
    mode: Mode
    finished: tuple[FinishedRow, ...] = ()
    preempted: tuple[int, ...] = ()  # tables are emptied, tokens stay
    block_copies: tuple[tuple[int, int, int], ...] = ()  # (kv_group, src, dst); read all sources first
    new_rows: tuple[NewRow, ...] = ()
    resumed: tuple[ResumedRow, ...] = ()
    table_changes: tuple[TableChange, ...] = ()
    rows: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    num_computed_tokens: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    num_scheduled_tokens: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    samples: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    pooled: tuple[int, ...] = ()  # rows, ascending, whose vector is complete at the end of the step; they do not sample
    awaits_mask: tuple[int, ...] = ()  # rows, ascending, that sample once ``gate`` opens
    gate: MaskGate | None = None  # on the output rank, where rows wait
    forget_prefix_cache: bool = False
    state_digest: int = 0
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one step says of the tokens of one row: RowLogprobs of scheduler_delta.proto."""

    req_index: int
    sampled: Logprobs | None = None  # of the tokens that it sampled
    prompt: Logprobs | None = None  # of its prompt, from ``first_position`` on
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the device thread returns for one RUN step."""

    step: int
    token_ids: Int32Array  # of each row of the work that samples, in the order of ``rows``; or NOT_SAMPLED
    token_digest: int = 0  # over all known tokens of all live rows after the step
    device_us: int = 0
    sampling_ns: int = 0  # when sampling began, on the monotonic clock; 0: not known
    logprobs: tuple[RowLogprobs, ...] = ()  # of rows that asked, ascending; the same on all ranks
    vectors: tuple[Float32Array, ...] = ()  # [hidden_size] each, of the work's ``pooled``; on the output rank
    num_tokens: Int32Array | None = None  # of ``token_ids``, per row; None: one each


def places_of_tokens(work: StepWork, num_tokens: Int32Array | None) -> tuple[Int32Array, Int32Array]:
    """Return row and position of each token that a step sampled; ``num_tokens`` as in ``StepOutput``."""
    rows, before, scheduled = work.rows[work.samples], work.num_computed_tokens, work.num_scheduled_tokens
    firsts = (before + scheduled)[work.samples]
    if work.speculation is not None:
        tries = np.isin(rows, work.speculation.rows)
        firsts[tries] = before[work.samples][tries] + 1
    if num_tokens is None:
        return rows, firsts
    within = np.arange(num_tokens.sum()) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
    return np.repeat(rows, num_tokens), np.repeat(firsts, num_tokens) + within.astype(np.int32)
