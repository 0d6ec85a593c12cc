"""Say which kernels can compute where: for all that is asked about before torch is there, and where there is none."""

from __future__ import annotations

from importlib.metadata import entry_points

from service_chassis.settings import Fault

AUTO = "auto"
ATTENTION_ENTRY_POINTS = "maniple.attention_backends"
# Our own, and the kind of device that each needs; none: any.
ATTENTION_BACKENDS = {"cpu": "cpu", "flashinfer": "cuda", "torch": "", "triton": "cuda"}
# Names that a program added in this process.
added_attention_backends: set[str] = set()

COMPILE_NEEDS_GPU = "needs a GPU: on a CPU whole layers are one kernel each already, and weights lie as those take them"
TUNE_NEEDS_GPU = "needs a GPU: what is measured are launches of its kernels; those of a CPU have none to choose"


def attention_backend_rule(name: str, device: str = AUTO) -> str:
    """Return why attention cannot be computed so, or nothing.

    Args:
        name: of a backend, or auto.
        device: kind of the rank's device; auto: not known yet.
    """
    if name == AUTO or name in added_attention_backends:
        return ""
    if name not in ATTENTION_BACKENDS:
        if entry_points(group=ATTENTION_ENTRY_POINTS, name=name):
            return ""
        names = ", ".join(sorted({*ATTENTION_BACKENDS, *added_attention_backends}))
        return f"must be {AUTO} or one of {names}, or an entry point of {ATTENTION_ENTRY_POINTS}"
    needed = ATTENTION_BACKENDS[name]
    if device in (AUTO, needed) or not needed:
        return ""
    return f"needs {'the CPU' if needed == 'cpu' else 'a CUDA device'}; the device of ranks is {device}"


def kernel_faults(device: str, *, attention_backend: str, torch_compile: bool, tune_kernels: bool) -> list[Fault]:
    """Find what ranks on this kind of device cannot be told; where it is auto, what none can."""
    faults: list[Fault] = []
    if rule := attention_backend_rule(attention_backend, device):
        faults.append(("attention_backend", attention_backend, rule))
    if device == "cpu" and torch_compile:
        faults.append(("torch_compile", True, COMPILE_NEEDS_GPU))
    if device == "cpu" and tune_kernels:
        faults.append(("tune_kernels", True, TUNE_NEEDS_GPU))
    return faults
