"""A group whose deltas and results are recorded as they pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from control_plane.executors.base import Executor
from control_plane.group.formation import ProgressCallback
from control_plane.group.settings import GroupFacts, GroupSettings
from control_plane.group.takeover import Adopted
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import scheduler_delta_pb2


class Recording(Protocol):
    """Where to; see ``GroupRecording``. No method waits."""

    def formed(self, facts: GroupFacts, world_size: int) -> None: ...

    def sent(self, delta: bytes) -> None: ...

    def answered(self, result: scheduler_delta_pb2.StepResult) -> None: ...

    def counted(self, step: int, token_digest: int) -> None: ...


class RecordedGroup(WorkerGroup):
    """A ``WorkerGroup`` that tells a recording of what it sends and gets."""

    def __init__(
        self,
        executor: Executor,
        settings: GroupSettings,
        *,
        owner_id: str,
        recording: Recording,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See ``WorkerGroup``."""
        super().__init__(executor, settings, owner_id=owner_id, clock=clock)
        self._recording = recording

    async def form(self, progress: ProgressCallback = lambda stage, rank, share, detail: None) -> GroupFacts:
        """See ``WorkerGroup``."""
        facts = await super().form(progress)
        self._recording.formed(facts, self.executor.world_size)
        return facts

    async def adopt(
        self,
        progress: ProgressCallback = lambda stage, rank, share, detail: None,
        *,
        on_held: Callable[[str, str], None] = lambda reason, owner_address: None,
    ) -> Adopted:
        """See ``WorkerGroup``."""
        adopted = await super().adopt(progress, on_held=on_held)
        self._recording.formed(adopted.facts, self.executor.world_size)
        return adopted

    def send(
        self,
        step: int,
        delta: bytes,
        mode: scheduler_delta_pb2.SchedulerDelta.Mode.ValueType,
        *,
        state_digest: int,
        num_tokens: int,
    ) -> None:
        """See ``WorkerGroup``."""
        if self.loss is None:  # else it goes nowhere
            self._recording.sent(delta)
        super().send(step, delta, mode, state_digest=state_digest, num_tokens=num_tokens)

    def expect_token_digest(self, step: int, value: int) -> None:
        """See ``WorkerGroup``."""
        self._recording.counted(step, value)
        super().expect_token_digest(step, value)

    def tenure_answered(self, result: scheduler_delta_pb2.StepResult) -> None:
        """See ``WorkerGroup``."""
        self._recording.answered(result)
        super().tenure_answered(result)
