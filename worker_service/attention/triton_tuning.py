"""Time the Triton attention kernels on this device, for shapes that the model at hand launches them with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton

from maniple_kernels.gpu.launch import architecture_of, compiled_width, num_processors
from maniple_kernels.gpu.paged_decode import DecodeScratch, num_splits_for, paged_decode
from maniple_kernels.gpu.paged_prefill import paged_prefill, plan_tiles, tile_queries
from maniple_kernels.gpu.shapes import AttentionKey, Shape, prefer_shape
from maniple_kernels.gpu.tuning import Tuned, TunedShapes, prefer_tuned
from worker_service.attention.base import AttentionSpec

# What is timed: a batch of middle size over middle contexts, and one long prompt.
_DECODE_ROWS, _CONTEXT, _PROMPT = 32, 2048, 2048


def attention_keys(spec: AttentionSpec) -> tuple[AttentionKey, ...]:
    """Return the kernels that a model launches."""
    width, itemsize = compiled_width(spec.head_dim), spec.dtype.itemsize
    return tuple(
        AttentionKey(kernel=kernel, architecture=architecture_of(spec.device), width=width, itemsize=itemsize)
        for kernel in ("paged_decode", "paged_prefill")
    )


def tune_attention(spec: AttentionSpec, store: TunedShapes | None = None) -> list[Tuned]:
    """Prefer what is fastest on this device; return what had to be measured for it."""
    found = store or TunedShapes(torch.cuda.get_device_name(spec.device))
    launches = {"paged_decode": _decode_launch(spec), "paged_prefill": _prefill_launch(spec)}

    def measure(key: AttentionKey, shape: Shape) -> float | None:
        prefer_shape(key, shape)
        try:
            seconds: float = triton.testing.do_bench(launches[key.kernel], warmup=5, rep=30, return_mode="median") / 1e3
        except (triton.CompilationError, triton.OutOfResources, RuntimeError):
            return None  # more shared memory or registers than there are
        return seconds

    return prefer_tuned(attention_keys(spec), found, measure)


def _cache(spec: AttentionSpec, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    keys, values = (torch.randn(shape, dtype=torch.float32, device=spec.device).to(spec.dtype) for _ in range(2))
    return keys.transpose(2, 3), values


def _query(spec: AttentionSpec, num_tokens: int) -> torch.Tensor:
    return torch.randn((num_tokens, spec.num_heads, spec.head_dim), device=spec.device).to(spec.dtype)


def _decode_launch(spec: AttentionSpec) -> Callable[[], object]:
    context = min(_CONTEXT, spec.max_model_len)
    blocks = -(-context // spec.block_size)
    rows = min(_DECODE_ROWS, spec.max_num_seqs)
    cache, query = _cache(spec, rows * blocks), _query(spec, rows)
    tables = torch.randperm(rows * blocks, device=spec.device).view(rows, blocks).to(torch.int32)
    lengths = torch.full((rows,), context, dtype=torch.int32, device=spec.device)
    splits = num_splits_for(rows, spec.num_kv_heads, spec.max_model_len, num_processors(spec.device))
    scratch = DecodeScratch(rows, spec.num_heads, spec.head_dim, splits, spec.device)
    return lambda: paged_decode(query, *cache, tables, lengths, 0.1, scratch=scratch)


def _prefill_launch(spec: AttentionSpec) -> Callable[[], object]:
    length = min(_PROMPT, spec.max_num_batched_tokens, spec.max_model_len)
    blocks = -(-length // spec.block_size)
    cache, query = _cache(spec, blocks), _query(spec, length)
    tables = torch.randperm(blocks, device=spec.device)[None].to(torch.int32)
    starts = np.array([0, length], np.int32)
    tiles = torch.from_numpy(plan_tiles(starts, tile_queries(query, cache[0]))).to(spec.device)
    on_device = torch.from_numpy(starts).to(spec.device)
    return lambda: paged_prefill(query, *cache, tables, tiles, on_device, on_device[1:], 0.1)
