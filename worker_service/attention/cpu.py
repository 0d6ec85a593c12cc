"""Attention by the kernels for the CPU, or by their plain-torch reference where those do not fit."""

from __future__ import annotations

import torch

from maniple_kernels.paged_attention import AttentionPlan, plan_attention
from service_chassis.errors import InvalidParameter
from worker_service.attention.base import AttentionSpec, Graphs, KvLayout, StepTensors
from worker_service.input_batch import StepInput


class CpuAttention:
    """See ``AttentionBackend``. Works on the host's arrays alone."""

    name = "cpu"
    layout = KvLayout.SLOTS_INNERMOST
    graphs = Graphs.PIECEWISE

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.device.type != "cpu":
            raise InvalidParameter(
                "attention_backend", self.name, f"needs the CPU; this rank's device is {spec.device}"
            )

    def begin(self, step: StepInput, tensors: StepTensors | None) -> AttentionPlan:
        return plan_attention(
            step.block_tables, step.query_start_loc, step.seq_lens, torch.get_num_threads(), step.wanted
        )
