"""Turn plans into protobuf: the only place where that happens."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.scheduling.plan import StepPlan, StepTokens
from maniple.v1 import sampling_pb2, scheduler_delta_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPayload:
    """What a request's ``payload`` must be: what workers need of it and the scheduler does not."""

    sampling: sampling_pb2.RowSampling
    control_blob: bytes = b""


class DeltaEncoder:
    def encode(self, plan: StepPlan) -> bytes:
        """Return the plan's SchedulerDelta, serialized. Plans in step order, each once."""
        raise NotImplementedError


def step_tokens(result: scheduler_delta_pb2.StepResult, plan: StepPlan) -> StepTokens:
    """Read a result against the plan of its own step. Raises ``ResultMismatch``."""
    raise NotImplementedError
