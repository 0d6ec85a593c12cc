"""How threads go through phases of work: nobody waits for one that does not run, and what comes out is the same."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from numba import njit

from maniple_kernels.cpu.claims import LINE
from maniple_kernels.cpu.phases import find_missing, finish, is_done
from maniple_kernels.decoder_layer import DecoderLayers, LayerShape, LayerWeights
from maniple_kernels.linear import PANEL, fits_panels, pack_panels
from support.attention_plans import make_plan

NUM_ITEMS = 5


@njit
def _finish(flags, place, done, phase):
    finish(flags, place, done, phase)


@njit
def _is_done(done, phase, num_items):
    return is_done(done, phase, num_items)


@njit
def _find(flags, first, num_items, done, phase):
    return find_missing(flags, first, num_items, done, phase, 0, 0)


@njit(nogil=True)
def _burn(count):
    total = 1.0
    for i in range(count):
        total = total * 0.5 + i
    return total


def _burn_until(stop: threading.Event) -> None:
    while not stop.is_set():
        _burn(1 << 20)


def test_phase_is_done_when_each_item_is_however_often() -> None:
    flags, done = np.zeros(3 * NUM_ITEMS, np.int64), np.zeros(3 * LINE, np.int64)
    for item in (4, 2, 4, 0, 0, 3):
        _finish(flags, NUM_ITEMS + item, done, 1)
        assert not _is_done(done, 1, NUM_ITEMS)
    _finish(flags, NUM_ITEMS + 1, done, 1)
    assert _is_done(done, 1, NUM_ITEMS)
    assert not _is_done(done, 0, NUM_ITEMS)


def test_what_somebody_else_does_not_finish_is_found_and_nothing_where_all_is_done() -> None:
    flags, done = np.zeros(2 * NUM_ITEMS, np.int64), np.zeros(2 * LINE, np.int64)
    found = []
    for item in (0, 1, 4):
        _finish(flags, NUM_ITEMS + item, done, 1)
    while (item := _find(flags, NUM_ITEMS, NUM_ITEMS, done, 1)) < NUM_ITEMS:  # as if another had taken all
        found.append(item)
        _finish(flags, NUM_ITEMS + item, done, 1)
    assert found == [2, 3]


def _layers(shape: LayerShape, dtype: torch.dtype) -> list[LayerWeights]:
    def linear(outputs: int, inputs: int) -> torch.Tensor:
        return pack_panels((torch.randn(outputs, inputs) / inputs**0.5).to(dtype))

    attended = shape.num_heads * shape.head_dim
    width = attended + 2 * shape.num_kv_heads * shape.head_dim
    return [
        LayerWeights(
            qkv=(linear(width, shape.size), torch.randn(width).to(dtype)),
            output=(linear(shape.size, attended), None),
            gate_up=(linear(2 * shape.inner_size, shape.size), None),
            down=(linear(shape.size, shape.inner_size), torch.randn(shape.size).to(dtype)),
            attention_norm=torch.rand(shape.size).to(dtype),
            mlp_norm=torch.rand(shape.size).to(dtype),
            head_norms=(torch.rand(shape.head_dim).to(dtype), torch.rand(shape.head_dim).to(dtype)),
            window=window,
        )
        for window in (0, 9, 0)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_step_has_the_same_bits_with_any_threads_whatever_takes_their_cores(dtype: torch.dtype) -> None:
    if not fits_panels(torch.empty(PANEL, 2, dtype=dtype)):
        pytest.skip("this CPU multiplies no panels")
    torch.manual_seed(3)
    shape = LayerShape(size=256, inner_size=512, num_heads=6, num_kv_heads=2, head_dim=32, eps=1e-5, scale=0.2)
    layers, cos_sin = _layers(shape, dtype), torch.randn(64, 32)
    requests = [(4 * number, 1) for number in range(9)]
    plan, num_blocks = make_plan(requests, 16, num_threads=2)
    positions = torch.tensor([before for before, _ in requests])
    blocks = torch.from_numpy(plan.block_tables)[torch.arange(9), positions // 16].long()
    x = torch.randn(9, shape.size)
    old = [(torch.randn(num_blocks, 2, 32, 16).to(dtype), torch.randn(num_blocks, 2, 16, 32).to(dtype)) for _ in layers]
    runner = DecoderLayers(layers, shape, cos_sin)

    def run(num_threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(num_threads)
        residual, kv = x.clone(), [(keys.clone(), values.clone()) for keys, values in old]
        runner.run(residual, positions, blocks * 16 + positions % 16, kv, plan)
        return [residual, *(tensor for layer in kv for tensor in layer)]

    expected = run(1)
    assert not torch.equal(expected[0], x)
    stop = threading.Event()
    burners = [threading.Thread(target=_burn_until, args=(stop,)) for _ in range(3)]
    try:
        for burner in burners:
            burner.start()
        for _ in range(200):
            for one, other in zip(run(2), expected, strict=True):
                assert torch.equal(one, other)
    finally:
        stop.set()
        for burner in burners:
            burner.join()
