"""Attention by the Triton kernels: single queries split over their keys, everything else by tiles of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from maniple_kernels.backend import fits_gpu_kernels
from maniple_kernels.gpu.launch import compiled_width, num_processors
from maniple_kernels.gpu.paged_decode import DecodeScratch, num_splits_for, paged_decode
from maniple_kernels.gpu.paged_prefill import paged_prefill, plan_tiles, tile_queries_for
from maniple_kernels.gpu.shapes import WIDEST_HEAD
from service_chassis.errors import InvalidParameter
from service_chassis.telemetry import get_logger
from worker_service.attention.base import AttentionSpec, Graphs, KvLayer, KvLayout, StepAttention, StepTensors
from worker_service.forward.staged_array import StagedArray
from worker_service.input_batch import StepInput


class TritonAttention:
    """See ``AttentionBackend``."""

    name = "triton"
    layout = KvLayout.DIMS_INNERMOST
    graphs = Graphs.WHOLE

    def __init__(self, spec: AttentionSpec) -> None:
        if not fits_gpu_kernels(torch.empty(0, device=spec.device)):
            rule = f"needs a CUDA device; this rank's is {spec.device}"
            raise InvalidParameter("attention_backend", self.name, rule)
        if compiled_width(spec.head_dim) > WIDEST_HEAD:
            rule = f"serves heads of at most {WIDEST_HEAD} elements; this model's have {spec.head_dim}"
            raise InvalidParameter("attention_backend", self.name, rule)
        self._spec = spec
        group = spec.num_heads // spec.num_kv_heads
        self._queries = tile_queries_for(group, spec.head_dim, spec.dtype.itemsize, spec.device)
        most_tiles = spec.max_num_batched_tokens // self._queries + spec.max_num_seqs
        self._tiles = StagedArray((most_tiles, 2), torch.int32, spec.device)
        self._scratch = self._largest_scratch()

    def _num_splits(self, num_reqs: int) -> int:
        """Return into how many parts keys are cut: by nothing that a graph could not know when it is recorded.

        Sizes in between count as the next power of two, so that a step has the same parts, and a row the same bits, by
        a graph with a few rows of padding as without.
        """
        spec = self._spec
        rounded = 1 << (num_reqs - 1).bit_length()
        return num_splits_for(rounded, spec.num_kv_heads, spec.max_model_len, num_processors(spec.device))

    def _largest_scratch(self) -> DecodeScratch:
        """Return memory for the parts of any step: with more rows there are fewer parts of each."""
        spec = self._spec
        doublings = [1 << power for power in range((spec.max_num_seqs - 1).bit_length() + 1)]
        most_parts = max(rows * self._num_splits(rows) for rows in doublings)
        return DecodeScratch(most_parts, spec.num_heads, spec.head_dim, 1, spec.device)

    def tune(self) -> None:
        from worker_service.attention.triton_tuning import tune_attention  # imports what only a device has

        for tuned in tune_attention(self._spec):
            get_logger().info(
                "kernel.tuned",
                kernel=tuned.key.kernel,
                shape=str(tuned.shape),
                us=round(tuned.seconds * 1e6, 1),
                table_us=round(tuned.table_seconds * 1e6, 1),
            )

    def begin(self, step: StepInput, tensors: StepTensors) -> StepAttention:
        if len(step.input_ids) == len(step.seq_lens):
            return _Decode(tensors, self._scratch.cut(self._num_splits(len(tensors.seq_lens))))
        return _Prefill(tensors, self._tiles.put(plan_tiles(step.query_start_loc, self._queries)))


class _Decode(StepAttention):
    """Of one query a request."""

    def __init__(self, tensors: StepTensors, scratch: DecodeScratch) -> None:
        self._tensors = tensors
        self._scratch = scratch

    def attend(
        self,
        query: Tensor,
        kv: KvLayer,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        return paged_decode(
            query,
            *kv,
            self._tensors.block_tables,
            self._tensors.seq_lens,
            scale,
            scratch=self._scratch,
            window=window,
            soft_cap=soft_cap,
            out=out,
        )


class _Prefill(StepAttention):
    """Of any numbers of queries."""

    def __init__(self, tensors: StepTensors, tiles: Tensor) -> None:
        self._tensors = tensors
        self._tiles = tiles

    def attend(
        self,
        query: Tensor,
        kv: KvLayer,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        return paged_prefill(
            query,
            *kv,
            self._tensors.block_tables,
            self._tiles,
            self._tensors.query_start_loc,
            self._tensors.seq_lens,
            scale,
            window=window,
            soft_cap=soft_cap,
            out=out,
        )
