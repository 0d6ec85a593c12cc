"""What a rank tells Prometheus, of itself and of its steps. docs/observability.md has the same table."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from service_chassis.metrics import COUNTER, GAUGE, HISTOGRAM, Board, Metric, Reading, by_name
from service_chassis.sleep_tags import MEMORY_TAGS
from worker_service.heartbeat import Vitals
from worker_service.step_loop import CompletedStep

_STEP_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_RANK = ("rank",)

METRICS = by_name(
    [
        Metric("maniple_worker_epoch", GAUGE, "The epoch that was granted last; 0: none.", _RANK),
        Metric("maniple_worker_accepted_step", GAUGE, "The last step that was accepted.", _RANK),
        Metric("maniple_worker_completed_step", GAUGE, "The last step that was completed.", _RANK),
        Metric("maniple_worker_running_seconds", GAUGE, "How long the present step has run; 0: none does.", _RANK),
        Metric("maniple_worker_busy", GAUGE, "1 during long work that is no step: form, load, profile, sleep.", _RANK),
        Metric("maniple_worker_failed", GAUGE, "1 once the rank has failed, which it never recovers from.", _RANK),
        Metric("maniple_worker_ready", GAUGE, "1 once all six stages are done and deltas are accepted.", _RANK),
        Metric("maniple_worker_asleep", GAUGE, "1 for memory that was given back.", (*_RANK, "tag")),
        Metric(
            "maniple_worker_memory_bytes", GAUGE, "Weights, and KV cache, as they were allocated.", (*_RANK, "what")
        ),
        Metric("maniple_worker_steps_total", COUNTER, "Steps that were completed.", _RANK),
        Metric(
            "maniple_worker_step_queue_seconds", HISTOGRAM, "From a step's acceptance to its start.", _RANK, _STEP_S
        ),
        Metric("maniple_worker_step_device_seconds", HISTOGRAM, "From its start to its completion.", _RANK, _STEP_S),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryFacts:
    """What is allocated, bytes; 0 before it is."""

    weight_bytes: int = 0
    kv_bytes: int = 0


class RankMetrics:
    """The metrics of one rank. Event loop."""

    def __init__(
        self,
        rank: int,
        vitals: Vitals,
        *,
        memory: Callable[[], RankMemoryFacts],
        asleep: Callable[[], Collection[str]],
        is_ready: Callable[[], bool],
    ) -> None:
        """Take who knows."""
        self._labels = (str(rank),)
        self._vitals = vitals
        self._memory = memory
        self._asleep = asleep
        self._is_ready = is_ready
        self._board = board = Board(METRICS)
        self._steps = board.count("maniple_worker_steps_total", *self._labels)
        self._queued = board.distribution("maniple_worker_step_queue_seconds", *self._labels)
        self._device = board.distribution("maniple_worker_step_device_seconds", *self._labels)

    def step_completed(self, done: CompletedStep) -> None:
        """Note a step."""
        self._steps.add()
        self._queued.observe((done.started_ns - done.accepted_ns) / 1e9)
        self._device.observe((done.completed_ns - done.started_ns) / 1e9)

    def read(self) -> list[Reading]:
        """Return all readings of this moment."""
        vitals, labels, memory = self._vitals, self._labels, self._memory()
        step, since = vitals.running
        values = {
            "epoch": vitals.epoch,
            "accepted_step": vitals.accepted[0],
            "completed_step": vitals.completed[0],
            "running_seconds": max(0.0, (vitals.held_since or time.monotonic()) - since) if step else 0.0,
            "busy": vitals.busy is not None,
            "failed": vitals.failure is not None,
            "ready": self._is_ready(),
        }
        readings = [Reading(f"maniple_worker_{name}", labels, value) for name, value in values.items()]
        asleep = self._asleep()
        readings += [Reading("maniple_worker_asleep", (*labels, tag), tag in asleep) for tag in MEMORY_TAGS]
        sizes = {"weights": memory.weight_bytes, "kv_cache": memory.kv_bytes}
        readings += [Reading("maniple_worker_memory_bytes", (*labels, what), size) for what, size in sizes.items()]
        return readings + self._board.readings()
