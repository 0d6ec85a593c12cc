"""Decide what each step computes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from control_plane.scheduling.plan import SampleOutput, StepPlan, StepTokens
from control_plane.scheduling.request import FinishReason, Refusal, Request
from service_chassis.ids import RequestId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What one group can hold. ``num_blocks`` counts the null block."""

    max_num_seqs: int
    max_num_batched_tokens: int  # at least max_num_seqs: every row can always take part
    max_model_len: int
    block_size: int
    num_blocks: int
    max_steps_in_flight: int = 2
    max_num_waiting: int = 1024


class Scheduler:
    step: Step  # the next step to plan
    num_running: int  # samples that hold blocks
    num_waiting: int  # samples that wait for a row or for blocks
    num_free_blocks: int  # hold nothing
    num_cached_blocks: int  # held by no row, may be hit or evicted
    num_preemptions: int
    num_outstanding: int  # steps that are not answered
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int  # tokens found

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        enable_prefix_caching: bool = True,
        first_step: int = 1,
        key_source: Callable[[], int] = partial(secrets.randbits, 64),
    ) -> None:
        raise NotImplementedError

    def refusal(self, request: Request) -> Refusal | None:
        """Say why ``request`` cannot be added, or None. Changes nothing."""
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Queue a request for which ``refusal`` is None."""
        raise NotImplementedError

    def finish(self, request_id: RequestId, reason: FinishReason, *, sample_index: int | None = None) -> bool:
        """End a request, or one of its samples, from outside. False: there is nothing (left) to end."""
        raise NotImplementedError

    def expired(self, now: float) -> list[RequestId]:
        """Return the requests whose deadline passed since the last call, each once. Changes nothing else."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        raise NotImplementedError

    def has_work(self) -> bool:
        """Some sample still has to be computed. ``schedule`` may return None all the same."""
        raise NotImplementedError

    def has_unflushed(self) -> bool:
        """Rows ended that no delta has said so of yet."""
        raise NotImplementedError

    def schedule(self, now: float) -> StepPlan | None:
        """Plan a RUN step; None if nothing can be computed now or enough steps are outstanding."""
        raise NotImplementedError

    def flush(self) -> StepPlan | None:
        """Plan an APPLY_ONLY step that carries what ended; None if there is none, or enough steps are outstanding."""
        raise NotImplementedError

    def apply(self, result: StepTokens) -> list[SampleOutput]:
        """Take the result of the oldest outstanding RUN step. Raises ``ResultMismatch``."""
        raise NotImplementedError

    def acknowledge(self, step: Step) -> None:
        """Every rank has accepted all steps up to ``step``: its APPLY_ONLY steps are outstanding no more."""
        raise NotImplementedError

    def set_paused(self, request_id: RequestId, paused: bool) -> bool:
        """Hold a request where it is, with its rows and blocks, or let it go on. False: unknown."""
        raise NotImplementedError

    def forget_prefix_cache(self) -> None:
        """Forget all blocks that no row holds; the next delta says so to the workers."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError, with a sentence, where the books do not agree. O(everything): tests and idle time."""
        raise NotImplementedError
