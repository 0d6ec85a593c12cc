"""Work out what KV blocks may take, and say it in one line of the log."""

from __future__ import annotations

from dataclasses import dataclass

from service_chassis.telemetry import get_logger
from worker_service.platforms.base import GIB, MemoryReading, Platform
from worker_service.runner import MemoryFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDemand:
    """What the limits of the batch would take of KV at the most."""

    block_bytes: int
    block_size: int
    max_num_seqs: int
    max_model_len: int

    @property
    def needed_bytes(self) -> int:
        """Bytes that let every row grow to its longest, the null block included."""
        return (self.max_num_seqs * -(-self.max_model_len // self.block_size) + 1) * self.block_bytes


def plan_memory(
    platform: Platform,
    *,
    before: MemoryReading,
    peak_bytes: int,
    weight_bytes: int,
    utilization: float,
    demand: KvDemand,
    step_us_per_token: float,
) -> MemoryFacts:
    """Turn what the profile measured into what the control plane plans with.

    Args:
        platform: the device.
        before: memory before the dummy step, weights loaded.
        peak_bytes: the most this process took during the dummy step.
        weight_bytes: of these, weights.
        utilization: the share of the device that the worker may use.
        demand: what KV could use at the most.
        step_us_per_token: time of the dummy step.
    """
    base_bytes = max(peak_bytes, before.own)
    kv_bytes = platform.kv_budget(before, base_bytes, utilization, demand.needed_bytes)
    facts = MemoryFacts(
        kv_bytes=kv_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=base_bytes - before.own,
        total_bytes=before.total,
        foreign_bytes=before.foreign,
        base_bytes=base_bytes,
        free_bytes=platform.free_for_kv(before, base_bytes),
        step_us_per_token=step_us_per_token,
    )
    num_blocks = kv_bytes // demand.block_bytes
    get_logger().info(
        "memory.profiled",
        device=platform.name,
        total_gib=_gib(facts.total_bytes),
        foreign_gib=_gib(facts.foreign_bytes),
        weights_gib=_gib(weight_bytes),
        activations_gib=_gib(facts.activation_bytes),
        kv_gib=_gib(kv_bytes),
        kv_wanted_gib=_gib(demand.needed_bytes),
        kv_blocks=num_blocks,
        kv_tokens=num_blocks * demand.block_size,
    )
    return facts


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)
