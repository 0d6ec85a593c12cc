"""Linear layers with weights of 8 and 4 bits, against float64 and against llama.cpp's blocks."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from maniple_kernels import quantized_linear as op
from maniple_kernels.cpu import simd_bytes

Float64Array = npt.NDArray[np.float64]
SHAPES = [(1, 16, 32), (3, 17, 96), (4, 96, 160), (5, 49, 32), (9, 33, 576), (33, 112, 64)]
IDS = [f"R{rows}-O{outputs}-I{inputs}" for rows, outputs, inputs in SHAPES]


def random_weights(outputs: int, inputs: int, bits: int) -> tuple[op.GroupedWeights, Float64Array]:
    """Return random weights, and what they stand for in float64 by the definition, without our unpacking."""
    random = np.random.default_rng(outputs * inputs + bits)
    groups = inputs // 32
    scales = random.uniform(0.001, 0.02, (outputs, groups)).astype(np.float16)
    if bits == 8:
        codes = random.integers(-128, 128, (outputs, groups, 32)).astype(np.int8)
        true = codes * scales.astype(np.float64)[..., None]
        return op.pack_bytes(torch.from_numpy(codes), torch.from_numpy(scales)), true.reshape(outputs, inputs)
    leasts = random.uniform(-0.2, 0.1, (outputs, groups)).astype(np.float16)
    codes = random.integers(0, 16, (outputs, groups, 32)).astype(np.uint8)
    true = codes * scales.astype(np.float64)[..., None] + leasts.astype(np.float64)[..., None]
    nibbles = codes[..., :16] | codes[..., 16:] << 4
    packed = op.pack_nibbles(torch.from_numpy(nibbles), torch.from_numpy(scales), torch.from_numpy(leasts))
    return packed, true.reshape(outputs, inputs)


def activations(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs)).to(dtype)


def in_eight_bits(x: Tensor) -> Float64Array:
    """Take the activations through 8 bits as the definition says, in float64 and group by group."""
    groups = x.double().numpy().reshape(len(x), -1, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    wide: Float64Array = np.rint(groups / np.where(scale == 0, 1, scale)) * scale
    return wide.reshape(len(x), -1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES, ids=IDS)
def test_product_is_that_of_dequantized_weights(rows: int, outputs: int, inputs: int, bits: int) -> None:
    weights, true = random_weights(outputs, inputs, bits)
    assert np.array_equal(op.dequantize(weights).numpy(), true.astype(np.float32))
    x = activations(rows, inputs)
    expected = in_eight_bits(x) @ true.T
    tolerance = 2e-6 * float(np.abs(in_eight_bits(x)).max() * np.abs(true).max()) * inputs
    for actual in (
        op.quantized_linear(x, weights, None, torch.float32),
        op.quantized_linear_reference(x, weights, None, torch.float32),
    ):
        assert actual.shape == (rows, outputs)
        assert np.abs(actual.numpy() - expected).max() <= tolerance
    # A weight in the wrong place would not be seen by a bound on the largest error alone.
    assert np.linalg.norm(expected - x.double().numpy() @ true.T) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_row_has_the_same_bits_alone_and_in_any_batch(bits: int) -> None:
    weights, _ = random_weights(80, 160, bits)
    x = activations(37, 160)
    together = op.quantized_linear(x, weights, None, torch.float32)
    for size in (1, 2, 3, 4, 5, 8, 11):
        parts = [op.quantized_linear(part.contiguous(), weights, None, torch.float32) for part in torch.split(x, size)]
        assert torch.equal(torch.cat(parts), together), size


@pytest.mark.parametrize("bits", [8, 4])
def test_bfloat16_goes_in_and_out_with_a_bias(bits: int) -> None:
    weights, _ = random_weights(48, 64, bits)
    x, bias = activations(6, 64, torch.bfloat16), activations(1, 48)[0]
    wide = op.quantized_linear(x.float(), weights, None, torch.float32)
    assert torch.equal(op.quantized_linear(x, weights, bias, torch.bfloat16), (wide + bias).to(torch.bfloat16))


def test_group_of_zeros_and_of_nothing_finite() -> None:
    weights, _ = random_weights(16, 64, 4)
    x = torch.zeros(2, 64)
    x[1, 40] = torch.inf
    y = op.quantized_linear(x, weights, None, torch.float32)
    assert torch.equal(y[0], torch.zeros(16))
    assert not torch.isfinite(y[1]).any()  # it is not hidden, and the row beside it does not see it
    assert op.quantized_linear(x[:0], weights, None, torch.float32).shape == (0, 16)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_an_embedding_are_those_of_the_weights(bits: int) -> None:
    weights, true = random_weights(50, 96, bits)
    ids = torch.tensor([49, 0, 16, 16, 31], dtype=torch.int32)
    assert np.array_equal(op.dequantize(weights, ids).numpy(), true[ids.numpy()].astype(np.float32))


def test_products_of_bytes_are_exact_with_and_without_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import njit

    from maniple_kernels.cpu import simd as floats

    store: Any = floats.store  # numba's operations take one argument less than they are written with
    simd: Any = simd_bytes
    load = simd.load_words
    random = np.random.default_rng(5)
    unsigned = random.integers(0, 256, 64).astype(np.uint8)
    signed = random.integers(-128, 128, 64).astype(np.int8)
    unsigned[:8], signed[:4], signed[4:8] = 255, 127, -128  # what 16 bits would not hold
    expected = (unsigned.astype(np.int64) * signed).reshape(16, 4).sum(1) + 7

    for has_instruction in {False, simd_bytes.has_vnni()}:
        monkeypatch.setattr(simd_bytes, "has_vnni", lambda has_instruction=has_instruction: has_instruction)

        @njit
        def products(start, x, y, out):  # type: ignore[no-untyped-def]
            words = load(start, 0), load(x, 0), load(y, 0)
            store(out, 0, simd.as_floats(simd.add_byte_products(*words)))

        out = np.zeros(16, np.float32)
        products(np.full(16, 7, np.int32), unsigned.view(np.int32), signed.view(np.int32), out)
        assert out.astype(np.int64).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_weights_are_those_that_llama_cpp_reads_from_its_blocks(kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(3).normal(size=(32, 64)).astype(np.float32)
    blocks = gguf.quantize(values, quantization).reshape(32, 2, -1)
    half = torch.from_numpy(blocks[..., :4].copy().view(np.float16))
    if kind == "Q8_0":
        weights = op.pack_bytes(torch.from_numpy(blocks[..., 2:].copy().view(np.int8)), half[..., 0].contiguous())
    else:
        codes = torch.from_numpy(blocks[..., 4:].copy())
        weights = op.pack_nibbles(codes, half[..., 0].contiguous(), half[..., 1].contiguous())
    expected = gguf.dequantize(blocks.reshape(32, -1), quantization)
    assert np.array_equal(op.dequantize(weights).numpy(), expected)
