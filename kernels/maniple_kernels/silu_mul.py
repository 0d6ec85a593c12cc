"""The gated activation of the MLP: ``silu(gate) * up`` with ``silu(x) = x / (1 + exp(-x))``. Source: Shazeer 2020."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from maniple_kernels.backend import fits_cpu_kernels, fits_gpu_kernels, note_reference


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """As ``silu_mul``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu of the first half of each row times the second half.

    Args:
        gate_up: [num_tokens, 2 * size], contiguous.
    Returns:
        [num_tokens, size], a new tensor.
    """
    rows, width = gate_up.shape
    if not fits_cpu_kernels(gate_up, width // 2):
        if fits_gpu_kernels(gate_up):
            from maniple_kernels.gpu.gate import gate_mul

            return gate_mul(gate_up)
        note_reference("silu_mul", gate_up.device, gate_up.dtype)
        return silu_mul_reference(gate_up)
    from maniple_kernels.cpu.silu_mul import gate_rows
    from maniple_kernels.cpu.simd import flat
    from maniple_kernels.cpu.threads import use_threads

    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    use_threads(8 * out.numel())
    gate_rows(flat(gate_up), rows, width // 2, flat(out))
    return out
