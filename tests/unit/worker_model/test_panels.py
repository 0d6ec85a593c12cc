"""Linears in panels, and a decoder layer in one kernel, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from maniple_kernels.decoder_layer import DecoderLayers, LayerShape, LayerWeights
from maniple_kernels.linear import PANEL, fits_panels, multiply_panels, pack_panels
from maniple_kernels.paged_attention import paged_attention_reference
from maniple_kernels.rms_norm import rms_norm_reference
from maniple_kernels.rotary import rotate_reference
from support.attention_plans import REQUESTS, make_plan
from worker_service.models import layers
from worker_service.models.layers import Linear, Placement
from worker_service.models.weight_memory import WeightMemory

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ROWS = 83


@pytest.fixture(autouse=True)
def _setting() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(5)


def needs_panels(dtype: torch.dtype) -> None:
    if not fits_panels(torch.empty(PANEL, 2, dtype=dtype)):
        pytest.skip("this CPU has not the instructions that panels are for")


@DTYPES
def test_panels_hold_every_weight_once(dtype: torch.dtype) -> None:
    weight = torch.arange(64 * 6).view(64, 6).to(dtype)
    panels = pack_panels(weight)
    step = panels.shape[-1]
    for output, inputs in ((0, 0), (31, 5), (32, 1), (63, 4)):
        assert panels[output // PANEL, inputs // step, output % PANEL, inputs % step] == weight[output, inputs]
    assert panels.numel() == weight.numel()


def test_weight_memory_hands_out_memory_that_nobody_else_has() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (40_000_000,), (7,), (1 << 20, 3), (2, 2, 2)]  # one is larger than a chunk
    tensors = [memory.empty(shape, dtype) for shape in shapes for dtype in (torch.bfloat16, torch.float32)]
    for index, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        tensor.flatten()[[0, -1]] = float(index)
    assert all((tensor.flatten()[[0, -1]] == index).all() for index, tensor in enumerate(tensors))


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_linear_in_panels_is_the_product_in_double_precision(dtype: torch.dtype, has_bias: bool) -> None:
    needs_panels(dtype)
    weight, x = torch.randn(96, 50).to(dtype), torch.randn(ROWS, 50).to(dtype)
    bias = torch.randn(96).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for count in (0, 1, 2, 3, 7, 8, 15, ROWS):
        actual = multiply_panels(x[:count], pack_panels(weight), bias, torch.float32)
        torch.testing.assert_close(actual.double(), expected[:count], rtol=1e-5, atol=1e-5)
    rounded = multiply_panels(x, pack_panels(weight), bias, torch.bfloat16)
    torch.testing.assert_close(rounded.double(), expected, rtol=5e-3, atol=5e-3)


@DTYPES
def test_linear_in_panels_gives_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    needs_panels(dtype)
    panels, x = pack_panels(torch.randn(64, 34).to(dtype)), torch.randn(ROWS, 34).to(dtype)
    whole = multiply_panels(x, panels, None, torch.float32)
    for start, end in ((0, 1), (5, 36), (82, 83), (10, 74), (1, 81)):
        assert torch.equal(multiply_panels(x[start:end], panels, None, torch.float32), whole[start:end])


def test_many_rows_go_to_matrix_units_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_panels(torch.bfloat16)
    monkeypatch.setattr(layers, "has_matrix_units", lambda dtype: True)
    linear = Linear(Placement(torch.device("cpu"), torch.bfloat16), 48, 64, bias=False)
    linear.weight.normal_()
    x = torch.randn(64, 48).bfloat16()
    expected = (x.double() @ linear.weight.double().T).bfloat16()
    linear.pack()
    assert linear.num_bytes == 2 * 64 * 48 * 2
    assert [linear.is_for_panels(count) for count in (1, 63, 64)] == [True, True, False]
    for count in (63, 64):
        torch.testing.assert_close(linear(x[:count]), expected[:count], rtol=1e-2, atol=1e-2)


def layer_reference(
    x: Tensor, layer: LayerWeights, plain: dict[str, Tensor], shape: LayerShape, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a layer in float32."""
    heads = rms_norm_reference(x, layer.attention_norm.float(), shape.eps) @ plain["qkv"].float().T
    heads = (heads + plain["bias"].float()).view(len(x), -1, shape.head_dim)
    query, key, value = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if layer.head_norms is not None:
        query = rms_norm_reference(query, layer.head_norms[0].float(), shape.eps)
        key = rms_norm_reference(key, layer.head_norms[1].float(), shape.eps)
    return rotate_reference(query, cos_sin, positions), rotate_reference(key, cos_sin, positions), value


@DTYPES
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("norms_heads", [False, True], ids=["", "head norms"])
def test_decoder_layer_is_its_operations(dtype: torch.dtype, window: int, norms_heads: bool) -> None:
    needs_panels(dtype)
    shape = LayerShape(size=64, inner_size=96, num_heads=6, num_kv_heads=3, head_dim=32, eps=1e-5, scale=0.2)
    sizes = {"qkv": (12 * 32, 64), "output": (64, 6 * 32), "gate_up": (192, 64), "down": (64, 96)}
    plain = {name: (torch.randn(size) / size[1] ** 0.5).to(dtype) for name, size in sizes.items()}
    plain["bias"] = torch.randn(12 * 32).to(dtype)
    layer = LayerWeights(
        qkv=(pack_panels(plain["qkv"]), plain["bias"]),
        output=(pack_panels(plain["output"]), None),
        gate_up=(pack_panels(plain["gate_up"]), None),
        down=(pack_panels(plain["down"]), None),
        attention_norm=torch.rand(64).to(dtype),
        mlp_norm=torch.rand(64).to(dtype),
        head_norms=(torch.rand(32).to(dtype), torch.rand(32).to(dtype)) if norms_heads else None,
        window=window,
    )
    cos_sin = torch.randn(200, 32)
    for requests in REQUESTS.values():
        plan, num_blocks = make_plan(requests, 16, num_threads=2)
        num_tokens = int(plan.query_start_loc[-1])
        positions = torch.cat([torch.arange(before, before + count) for before, count in requests])
        rows = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor([count for _, count in requests]))
        blocks = torch.from_numpy(plan.block_tables)[rows, positions // 16].long()
        keys, values = torch.randn(num_blocks, 3, 32, 16).to(dtype), torch.randn(num_blocks, 3, 16, 32).to(dtype)
        old_keys, old_values = keys.clone(), values.clone()
        x = torch.randn(num_tokens, 64)
        query, key, value = layer_reference(x, layer, plain, shape, cos_sin, positions)
        wide_keys, wide_values = keys.float(), values.float()
        wide_keys[blocks, :, :, positions % 16] = key.to(dtype).float()
        wide_values[blocks, :, positions % 16] = value.to(dtype).float()
        attended = paged_attention_reference(query, wide_keys, wide_values, plan, shape.scale, window)
        expected = x + attended.reshape(num_tokens, -1) @ plain["output"].float().T
        normed = rms_norm_reference(expected, layer.mlp_norm.float(), shape.eps)
        gate, up = (normed @ plain["gate_up"].float().T).chunk(2, dim=-1)
        expected = expected + (torch.nn.functional.silu(gate) * up) @ plain["down"].float().T

        residual, kv = x.clone(), [(keys, values)]
        runner = DecoderLayers([layer], shape, cos_sin)
        assert runner.fits(kv)
        slots = blocks * 16 + positions % 16
        runner.run(residual, positions, slots, kv, plan)
        tolerance = 1e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(residual, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(keys.float(), wide_keys, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(values.float(), wide_values, rtol=tolerance, atol=tolerance)

        # Where some tokens alone are looked at, these have the same bits, and so have all keys and values.
        for wanted in (plan.query_start_loc[1:] - 1, np.arange(0, num_tokens, 3), np.arange(0)):
            some, cache = x.clone(), (old_keys.clone(), old_values.clone())
            runner.run(some, positions, slots, [cache], replace(plan, wanted=wanted.astype(np.int64)))
            assert torch.equal(some[wanted], residual[wanted])
            assert torch.equal(cache[0], keys)
            assert torch.equal(cache[1], values)


def test_decoder_layers_let_a_cache_go_with_its_owner() -> None:
    needs_panels(torch.float32)
    shape = LayerShape(size=32, inner_size=32, num_heads=1, num_kv_heads=1, head_dim=32, eps=1e-5, scale=0.2)
    linear = pack_panels(torch.randn(32, 32)), None
    layer = LayerWeights(
        qkv=(pack_panels(torch.randn(96, 32)), None),
        output=linear,
        gate_up=(pack_panels(torch.randn(64, 32)), None),
        down=linear,
        attention_norm=torch.rand(32),
        mlp_norm=torch.rand(32),
        head_norms=None,
        window=0,
    )
    runner = DecoderLayers([layer], shape, torch.randn(20, 32))
    plan, num_blocks = make_plan([(0, 3)], 16, num_threads=1)
    kv = [(torch.zeros(num_blocks, 1, 32, 16), torch.zeros(num_blocks, 1, 16, 32))]
    runner.run(torch.randn(3, 32), torch.arange(3), torch.arange(16, 19), kv, plan)
    assert runner._caches
    kv.clear()
    assert not runner._caches
