"""Attention in plain torch, request by request, on any device: slow, and what the others are measured by."""

from __future__ import annotations

from torch import Tensor

from maniple_kernels.paged_attention import AttentionPlan, paged_attention_reference, plan_attention
from worker_service.attention.base import AttentionSpec, Graphs, KvLayer, KvLayout, StepAttention, StepTensors
from worker_service.input_batch import StepInput


class ReferenceAttention:
    """See ``AttentionBackend``."""

    name = "torch"
    layout = KvLayout.DIMS_INNERMOST
    graphs = Graphs.PIECEWISE

    def __init__(self, spec: AttentionSpec | None = None) -> None:
        """Take any device."""

    def begin(self, step: StepInput, tensors: StepTensors | None) -> _ReferenceStep:
        return _ReferenceStep(plan_attention(step.block_tables, step.query_start_loc, step.seq_lens, 1))


class _ReferenceStep(StepAttention):
    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan

    def attend(
        self,
        query: Tensor,
        kv: KvLayer,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        attended = paged_attention_reference(query, *kv, self._plan, scale, window, soft_cap)
        return attended if out is None else out.copy_(attended)
