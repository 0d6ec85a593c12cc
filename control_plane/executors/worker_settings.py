"""What an executor starts its workers with."""

from __future__ import annotations

from dataclasses import dataclass

from service_chassis.flags import flag_words
from service_chassis.ids import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of every rank that an executor starts. Meanings and defaults as in ``WorkerConfig`` of a worker."""

    device: str = "auto"
    first_device: int = 0
    device_ids: tuple[int, ...] = ()  # of the ranks, in their order
    num_threads: int = 0
    num_groups_sharing: int = 1
    attention_backend: str = "auto"
    torch_compile: bool = False
    tune_kernels: bool = False
    enable_sleep_mode: bool = False
    sleep_backend: str = "auto"
    sleep_directory: str = ""
    report_interval_s: float = 0.1
    idle_report_interval_s: float = 1.0
    max_step_message_bytes: int = 64 << 20
    allow_insecure_serialization: bool = False
    allow_plaintext_listen: bool = False
    allow_plaintext_snapshot: bool = False
    log_level: str = "info"
    log_format: str = "auto"

    def arguments(
        self, rank: Rank, world_size: int, *, listen: str, health_listen: str, orphan_grace_s: float, **more: object
    ) -> list[str]:
        """Return the command line of one rank, behind ``python``."""
        flags = {
            "listen": listen,
            "health-listen": health_listen,
            "rank": rank,
            "world-size": world_size,
            "port-offset": self.first_device + rank,  # groups of one process follow each other in this, too
            "device": self.device,
            "first-device": self.first_device,
            "num-threads": self.num_threads,
            "num-groups-sharing": self.num_groups_sharing,
            "attention-backend": self.attention_backend,
            "torch-compile": self.torch_compile,
            "tune-kernels": self.tune_kernels,
            "enable-sleep-mode": self.enable_sleep_mode,
            "sleep-backend": self.sleep_backend,
            "sleep-directory": self.sleep_directory,
            "report-interval-s": self.report_interval_s,
            "idle-report-interval-s": self.idle_report_interval_s,
            "orphan-grace-s": orphan_grace_s,
            "max-step-message-bytes": self.max_step_message_bytes,
            "allow-insecure-serialization": self.allow_insecure_serialization,
            **({"device-ids": self.device_ids[rank]} if self.device_ids else {}),
            # Only where it is said: else the worker's environment may.
            **({"allow-plaintext-listen": True} if self.allow_plaintext_listen else {}),
            **({"allow-plaintext-snapshot": True} if self.allow_plaintext_snapshot else {}),
            "log-level": self.log_level,
            "log-format": self.log_format,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        words = (word for name, value in flags.items() for word in flag_words(f"--{name}", value))
        return ["-m", "worker_service", *words]
