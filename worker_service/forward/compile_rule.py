"""Say which forwards torch may compile, without importing what compiles."""

from __future__ import annotations

import torch

from service_chassis.kernel_rules import COMPILE_NEEDS_GPU

INDUCTOR = "inductor"  # torch's own compiler


def compile_rule(compiler: str, device: torch.device, world_size: int, implementation: str = "native") -> str:
    """Return the rule that keeps a forward on this device from being compiled, or nothing."""
    if not compiler:
        return ""
    if implementation != "native":
        return f"is for models of our own code; {implementation} computes this one"
    if world_size > 1:
        return f"holds on one rank, not on {world_size}: the compiler cannot see into the exchanges between ranks"
    if compiler == INDUCTOR and device.type == "cpu":
        return COMPILE_NEEDS_GPU
    return ""
