"""Attention by FlashInfer, where it is installed: its batch attention over a paged cache, planned once a step.

A plan depends on scale, window and cap, which differ between layers of some models: there is one wrapper for each that
occurs, planned when a step first needs it. Plans are made on the host, so graphs are recorded around attention.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from service_chassis.errors import InvalidParameter
from worker_service.attention.base import AttentionSpec, Graphs, KvLayer, KvLayout, StepAttention, StepTensors
from worker_service.input_batch import StepInput

# What FlashInfer recommends for the parts of keys that it merges.
_WORKSPACE_BYTES = 128 << 20


class FlashInferAttention:
    """See ``AttentionBackend``."""

    name = "flashinfer"
    layout = KvLayout.DIMS_INNERMOST
    graphs = Graphs.PIECEWISE

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.device.type != "cuda":
            raise InvalidParameter("attention_backend", self.name, f"needs a CUDA device; this rank's is {spec.device}")
        if importlib.util.find_spec("flashinfer") is None:
            raise InvalidParameter("attention_backend", self.name, "needs FlashInfer: install maniple[flashinfer]")
        if spec.dtype not in (torch.float16, torch.bfloat16):
            rule = f"serves float16 and bfloat16; this model's cache is {str(spec.dtype).removeprefix('torch.')}"
            raise InvalidParameter("attention_backend", self.name, rule)
        self._plans = FlashInferPlans(spec)

    def begin(self, step: StepInput, tensors: StepTensors) -> FlashInferStep:
        return FlashInferStep(self._plans, step)


class FlashInferPlans:
    """The wrappers of one model. They share one workspace, since they run one after another."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._wrappers: dict[tuple[float, int, float], object] = {}

    def wrapper(self, scale: float, window: int, soft_cap: float) -> object:
        """Return the wrapper for layers of this kind."""
        kind = (scale, window, soft_cap)
        if kind not in self._wrappers:
            make = _flashinfer().BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[kind] = make(self._workspace, kv_layout="HND")
        return self._wrappers[kind]


class FlashInferStep(StepAttention):
    """A ``StepAttention``."""

    def __init__(self, plans: FlashInferPlans, step: StepInput) -> None:
        self._plans = plans
        self._pages = PageIndex(step, plans.spec.block_size)
        self._planned: dict[tuple[float, int, float], object] = {}

    def attend(
        self,
        query: Tensor,
        kv: KvLayer,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        kind = (scale, window, soft_cap)
        if kind not in self._planned:
            self._planned[kind] = self._plan(*kind)
        keys, values = kv
        attended: Tensor = self._planned[kind].run(  # type: ignore[attr-defined]
            query.contiguous(), (keys.transpose(2, 3), values), out=out
        )
        return attended

    def _plan(self, scale: float, window: int, soft_cap: float) -> object:
        spec, pages = self._plans.spec, self._pages
        wrapper = self._plans.wrapper(scale, window, soft_cap)
        wrapper.plan(  # type: ignore[attr-defined]
            pages.query_start_loc,
            pages.page_starts,
            pages.page_ids,
            pages.last_page_lens,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window > 0 else -1,  # it counts the keys to the left of a token
            logits_soft_cap=soft_cap if soft_cap > 0 else None,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )
        return wrapper


class PageIndex:
    """Block tables as FlashInfer takes them: the used blocks of all requests in one list, and where each begins."""

    def __init__(self, step: StepInput, block_size: int) -> None:
        num_pages = -(-step.seq_lens // block_size)
        is_used = np.arange(step.block_tables.shape[1]) < num_pages[:, None]
        starts = np.zeros(len(num_pages) + 1, np.int32)
        np.cumsum(num_pages, out=starts[1:])
        self.query_start_loc = torch.from_numpy(step.query_start_loc.copy())  # the batch writes over its own
        self.page_starts = torch.from_numpy(starts)
        self.page_ids = torch.from_numpy(step.block_tables[is_used])
        self.last_page_lens = torch.from_numpy((step.seq_lens - (num_pages - 1) * block_size).astype(np.int32))


def _flashinfer() -> ModuleType:
    return importlib.import_module("flashinfer")
