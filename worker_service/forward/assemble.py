"""Put together what runs a model's forward on this device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from service_chassis.errors import InvalidParameter
from service_chassis.kernel_rules import AUTO
from worker_service.attention.base import AttentionSpec, Tunable
from worker_service.attention.registry import choose_attention_backend
from worker_service.forward.forward_pass import ForwardPass
from worker_service.forward.graph_runner import GraphRunner
from worker_service.forward.recorder import Recorder
from worker_service.forward.step_arrays import DeviceStepArrays, HostStepArrays, StepArrays
from worker_service.models.registry import Forward, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How a forward is run; what it computes does not depend on it, but for rounding."""

    attention_backend: str = AUTO
    compiler: str = ""  # of torch's backends, "inductor" to be served with; none: not compiled
    tune_kernels: bool = False  # at warm-up
    recorder: Recorder | None = None  # None: the device's own, if it has one


def assemble_forward(model: Model, spec: AttentionSpec, options: ForwardOptions) -> ForwardPass:
    """Return the forward pass of ``model``.

    Raises:
        InvalidParameter: the attention that was asked for cannot serve it, or has nothing to tune.
    """
    attention = choose_attention_backend(options.attention_backend, spec)
    if options.tune_kernels and not isinstance(attention, Tunable):
        rule = f"needs the attention backend triton: {attention.name} has no kernels of ours to measure"
        raise InvalidParameter("tune_kernels", True, rule)
    forward: Forward = model.forward
    if options.compiler:
        from worker_service.forward.compiled_forward import CompiledForward

        forward = CompiledForward(forward, model.config.num_layers, backend=options.compiler)
    recorder = (options.recorder or _recorder_of(spec.device)) if model.records else None
    if recorder is None and spec.device.type == "cpu":
        return ForwardPass(forward, attention, HostStepArrays(), None)
    arrays: StepArrays = DeviceStepArrays(
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_seqs=spec.max_num_seqs,
        max_num_blocks=-(-spec.max_model_len // spec.block_size),
        device=spec.device,
    )
    graphs = GraphRunner(forward, attention, arrays, recorder) if recorder is not None else None
    return ForwardPass(forward, attention, arrays, graphs)


def _recorder_of(device: torch.device) -> Recorder | None:
    if device.type != "cuda":
        return None
    from worker_service.forward.cuda_recorder import CudaRecorder

    return CudaRecorder(device)
