"""Weights of 8 and 4 bits: what they are made of, and when they cannot be had.

From a checkpoint they are rounded by groups of 32 inputs. What a GGUF file holds in blocks of 8 or 4 bits keeps its
codes: nothing is rounded a second time. Parts that are computed together share one form; where blocks of several
kinds meet, they become 8 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from maniple_kernels.quantized_linear import GROUP, GroupedWeights, can_quantize, pack_bytes, pack_nibbles
from service_chassis.errors import InvalidParameter
from worker_service.models.config import LlamaConfig
from worker_service.models.weight_memory import WeightMemory

QUANTIZATIONS = ("none", "int8", "q4")
# Kinds of GGUF blocks that are kept, and the bytes of one, of 32 weights: float16 scale, for Q4_1 least weight, codes.
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
_OUTPUTS_AT_ONCE = 16  # that the kernel computes


@dataclass(frozen=True, slots=True)
class Quantization:
    """What was asked for, and what the checkpoint holds."""

    name: str = "none"
    blocks: Mapping[str, str] = field(default_factory=dict)  # tensor of the checkpoint -> kind of its blocks

    def __bool__(self) -> bool:
        return self.name != "none"

    @property
    def bits(self) -> int:
        """Of weights that are not in blocks. Some tensors of a file in blocks are not because they need more bits."""
        return 4 if self.name == "q4" and not self.blocks else 8


class BlockRows(NamedTuple):
    """Weights of some outputs as they lie in the file."""

    kind: str  # of BLOCK_BYTES
    rows: Tensor  # [outputs, bytes] uint8


class Codes(NamedTuple):
    """Codes of some outputs, as ``pack_bytes`` and ``pack_nibbles`` take them."""

    codes: Tensor
    scales: Tensor
    leasts: Tensor | None


def empty_blocks(kind: str, num_outputs: int, num_inputs: int, device: torch.device) -> BlockRows:
    """Return room for weights in blocks."""
    num_bytes = num_inputs // GROUP * BLOCK_BYTES[kind]
    return BlockRows(kind, torch.empty((num_outputs, num_bytes), dtype=torch.uint8, device=device))


def group_weights(
    weight: Tensor, blocks: Mapping[int, BlockRows], quantization: Quantization, memory: WeightMemory
) -> GroupedWeights:
    """Return the weights of a linear layer as they are computed.

    Args:
        weight: [outputs, inputs]; what is in ``blocks`` is not read.
        blocks: first output -> weights of it and of those behind it.
        quantization: of the model.
        memory: for the result.
    """
    packed = _pack(_codes(weight, blocks, quantization))
    return GroupedWeights(
        _placed(packed.codes, memory),
        _placed(packed.scales, memory),
        None if packed.leasts is None else _placed(packed.leasts, memory),
        packed.num_outputs,
    )


def _placed(tensor: Tensor, memory: WeightMemory) -> Tensor:
    return memory.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _codes(weight: Tensor, blocks: Mapping[int, BlockRows], quantization: Quantization) -> Codes:
    if not blocks:
        return quantize_nibbles(weight) if quantization.bits == 4 else quantize_bytes(weight)
    bounds = _bounds(weight, blocks)
    kept = [codes_of(blocks[first]) if first in blocks else None for first, _ in bounds]
    whole = [codes for codes in kept if codes is not None]
    kinds = {codes.leasts is None for codes in whole}
    if len(whole) == len(kept) and (kinds == {True} or (kinds == {False} and quantization.name == "q4")):
        return _joined(whole)
    plain = [
        weight[first:last].float() if codes is None else _plain(codes)
        for (first, last), codes in zip(bounds, kept, strict=True)
    ]
    return quantize_bytes(torch.cat(plain))


def _bounds(weight: Tensor, blocks: Mapping[int, BlockRows]) -> list[tuple[int, int]]:
    """Return (first, last) outputs of what is in blocks and of what lies between."""
    ends = {first + len(block.rows) for first, block in blocks.items()}
    marks = sorted({0, len(weight), *blocks, *ends})
    return list(itertools.pairwise(marks))


def codes_of(blocks: BlockRows) -> Codes:
    """Read blocks as llama.cpp lays them out."""
    kind, rows = blocks
    each = rows.view(len(rows), -1, BLOCK_BYTES[kind])
    scales = _halves(each, 0)
    if kind == "Q8_0":
        return Codes(each[..., 2:].contiguous().view(torch.int8), scales, None)
    if kind == "Q4_1":
        return Codes(each[..., 4:].contiguous(), scales, _halves(each, 2))
    # Q4_0 is scale * (code - 8); eight times a float16 is one, too.
    return Codes(each[..., 2:].contiguous(), scales, scales * -8)


def _halves(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def quantize_bytes(weight: Tensor) -> Codes:
    """Round [outputs, inputs] to 8 bits by groups, symmetrically."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / 127).half()
    wide = _nonzero(scales)[..., None]
    return Codes(torch.round(groups / wide).clamp_(-127, 127).to(torch.int8), scales, None)


def quantize_nibbles(weight: Tensor) -> Codes:
    """Round [outputs, inputs] to 4 bits by groups, from the least weight to the greatest."""
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales, leasts = ((high - low) / 15).half(), low.half()
    codes = torch.round((groups - leasts.float()[..., None]) / _nonzero(scales)[..., None]).clamp_(0, 15)
    codes = codes.to(torch.uint8)
    return Codes(codes[..., :16] | codes[..., 16:] << 4, scales, leasts)


def _nonzero(scales: Tensor) -> Tensor:
    """Return scales to divide by: a group of equal weights has scale zero, and codes zero."""
    wide = scales.float()
    return torch.where(wide == 0, torch.inf, wide)


def _plain(codes: Codes) -> Tensor:
    scales = codes.scales.float()[..., None]
    if codes.leasts is None:
        return torch.flatten(codes.codes.float() * scales, 1)
    wide = torch.cat([codes.codes & 0x0F, codes.codes >> 4], dim=-1).float()
    return torch.flatten(wide * scales + codes.leasts.float()[..., None], 1)


def _joined(parts: list[Codes]) -> Codes:
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    leasts = [part.leasts for part in parts if part.leasts is not None]
    return Codes(codes, scales, torch.cat(leasts) if leasts else None)


def _pack(codes: Codes) -> GroupedWeights:
    if codes.leasts is None:
        return pack_bytes(codes.codes, codes.scales)
    return pack_nibbles(codes.codes, codes.scales, codes.leasts)


def check_quantization(
    quantization: Quantization, config: LlamaConfig, *, device: torch.device, dtype: torch.dtype, world_size: int
) -> None:
    """Refuse what cannot be computed.

    Raises:
        InvalidParameter: says why.
    """
    name = quantization.name
    if name not in QUANTIZATIONS:
        raise InvalidParameter("quantization", name, f"must be one of {', '.join(QUANTIZATIONS)}")
    if not quantization:
        if quantization.blocks:
            rule = "must be int8 or q4: this directory keeps the blocks of a GGUF file"
            raise InvalidParameter("quantization", name, rule)
        return
    if device.type != "cpu":
        raise InvalidParameter("quantization", name, f"is for the CPU, not for {device.type}")
    if not can_quantize():
        raise InvalidParameter("quantization", name, "needs numba and the system's OpenMP library")
    if dtype not in (torch.float32, torch.bfloat16):
        rule = f"computes with activations of float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        raise InvalidParameter("quantization", name, rule)
    heads, kv_heads = config.num_heads // world_size, max(1, config.num_kv_heads // world_size)
    inputs = {
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size // world_size,
        "query heads times head dimension": heads * config.head_dim,
    }
    if wrong := {what: size for what, size in inputs.items() if size % GROUP}:
        of = "" if world_size == 1 else f" of each of {world_size} ranks"
        said = ", ".join(f"{what} {size}" for what, size in wrong.items())
        raise InvalidParameter("quantization", name, f"needs inputs in groups of {GROUP}{of}; not whole are: {said}")
    outputs = kv_heads * config.head_dim
    if outputs % _OUTPUTS_AT_ONCE:
        rule = f"needs multiples of {_OUTPUTS_AT_ONCE} as KV heads times head dimension, which are {outputs}"
        raise InvalidParameter("quantization", name, rule)
