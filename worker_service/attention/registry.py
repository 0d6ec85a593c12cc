"""Choose how attention is computed, by name. Others may add ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from maniple_kernels.backend import has_gpu_kernels
from service_chassis.errors import InvalidParameter
from service_chassis.kernel_rules import (
    ATTENTION_ENTRY_POINTS,
    AUTO,
    added_attention_backends,
    attention_backend_rule,
)
from service_chassis.telemetry import get_logger
from worker_service.attention.base import AttentionBackend, AttentionSpec

Factory = Callable[[AttentionSpec], AttentionBackend]
"""Makes a backend; raises ``InvalidParameter`` with the reason where it cannot serve what is asked."""


def _cpu(spec: AttentionSpec) -> AttentionBackend:
    from worker_service.attention.cpu import CpuAttention

    return CpuAttention(spec)


def _torch(spec: AttentionSpec) -> AttentionBackend:
    from worker_service.attention.reference import ReferenceAttention

    return ReferenceAttention(spec)


def _triton(spec: AttentionSpec) -> AttentionBackend:
    if not has_gpu_kernels():
        raise InvalidParameter("attention_backend", "triton", "needs Triton: install maniple[cuda]")
    from worker_service.attention.triton import TritonAttention

    return TritonAttention(spec)


def _flashinfer(spec: AttentionSpec) -> AttentionBackend:
    from worker_service.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(spec)


_factories: dict[str, Factory] = {"cpu": _cpu, "torch": _torch, "triton": _triton, "flashinfer": _flashinfer}


def register_attention_backend(name: str, factory: Factory) -> None:
    """Add a backend under a new name, for this process. A package may instead name a factory as an entry point."""
    if name == AUTO or name in _factories:
        raise ValueError(f"{name}: there is an attention backend of this name")
    _factories[name] = factory
    added_attention_backends.add(name)


def choose_attention_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Make the backend with this name; "auto" is triton on a GPU and cpu elsewhere.

    Raises:
        InvalidParameter: there is none of this name, or it cannot serve this model on this device.
    """
    chosen = name if name != AUTO else ("triton" if spec.device.type == "cuda" else "cpu")
    factory = _factories.get(chosen) or _installed(chosen)
    if factory is None:
        raise InvalidParameter("attention_backend", name, attention_backend_rule(name))
    backend = factory(spec)
    get_logger().info(
        "attention_backend.chosen", name=backend.name, graphs=backend.graphs.value, kv_layout=backend.layout.value
    )
    return backend


def _installed(name: str) -> Factory | None:
    for point in entry_points(group=ATTENTION_ENTRY_POINTS, name=name):
        factory: Factory = point.load()
        return factory
    return None
