"""What an executor starts its workers with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of every rank that an executor starts. Meanings and defaults as in ``WorkerConfig`` of a worker."""

    device: str = "auto"
    num_threads: int = 0
    report_interval_s: float = 0.1
    idle_report_interval_s: float = 1.0
    max_step_message_bytes: int = 64 << 20
    allow_insecure_serialization: bool = False
    log_level: str = "info"
    log_format: str = "auto"
