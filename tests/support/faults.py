"""Form a real group of one worker process, hurt it, and see that nothing of it is left.

A fault test asserts four things: the fault fired, the verdict came once and names the rank, nothing outlived the group,
and a newly formed group works. ``forming`` and ``assert_next_group_works`` carry the last two; for whole servers
``serving`` and ``assert_next_server_works`` of serve_process.py do.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from control_plane.executors.base import Executor
from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.executors.worker_settings import WorkerSettings
from control_plane.group.loss import LossReason
from control_plane.group.settings import GroupFacts, GroupSettings
from control_plane.group.worker_group import WorkerGroup
from service_chassis.protocol.digest import MASK64, row_factor, token_term
from service_chassis.scripted import Fault, ScriptedOptions, scripted_model
from support.one_row import ROW_KEY, OneRow, scripted_tokens
from support.waiting import until

WORKER = WorkerSettings(device="cpu", report_interval_s=0.05, idle_report_interval_s=0.1, log_level="warning")
SETTINGS = GroupSettings(
    model="scripted",
    max_num_seqs=4,
    num_kv_blocks=64,
    report_interval_s=0.05,
    idle_report_interval_s=0.1,
    heartbeat_timeout_s=5.0,
    lease_s=3.0,
    step_timeout_s=5.0,
    startup_timeout_s=30.0,
    teardown_grace_s=2.0,
)
# For faults that a clock must find; long enough for a busy machine.
SHORT_TIMES = {"heartbeat_timeout_s": 1.0, "lease_s": 1.0, "step_timeout_s": 0.5}


class LiveGroup:
    """A formed group, one row of traffic, and everything the group said."""

    def __init__(self, executor: Executor, settings: GroupSettings) -> None:
        self.executor = executor
        self.group = WorkerGroup(executor, settings, owner_id=f"owner-{time.monotonic_ns()}")
        self.row = OneRow()
        self.tokens: list[int] = []
        self.result_steps: list[int] = []
        self.losses: list[LossReason] = []
        self.lost_at = 0.0
        self.facts: GroupFacts | None = None
        self.group.on_result = self._on_result
        self.group.on_lost = self._on_lost

    def _on_result(self, result) -> None:  # type: ignore[no-untyped-def]
        self.result_steps.append(result.step)
        self.tokens += result.token_ids

    def _on_lost(self, loss: LossReason) -> None:
        self.losses.append(loss)
        self.lost_at = time.monotonic()

    @property
    def pid(self) -> int:
        return self.executor.describe_rank(self.executor.ranks[0])[1]

    @property
    def directory(self) -> Path:
        return Path(self.executor.describe_rank(self.executor.ranks[0])[0].removeprefix("unix:")).parent

    async def form(self) -> GroupFacts:
        self.facts = await self.group.form()
        return self.facts

    def send_step(self) -> int:
        """Send the next step of the row."""
        delta = self.row.next()
        self.group.send(
            delta.step, delta.SerializeToString(), delta.mode, state_digest=delta.state_digest, num_tokens=1
        )
        return delta.step

    async def run_steps(self, count: int) -> None:
        """Run steps one after another."""
        for _ in range(count):
            step = self.send_step()

            def is_over(step: int = step) -> bool:
                return step in self.result_steps or bool(self.losses)

            await until(is_over, f"result of step {step}")

    async def lost(self, *, within_s: float) -> LossReason:
        """Wait for the verdict."""
        await until(lambda: self.losses, "the verdict", timeout_s=within_s)
        return self.losses[0]

    def token_digest(self, step: int) -> int:
        """The token digest after a step, by the definitions of model and digest."""
        known = [*self.row.prompt, *scripted_tokens(self.row.prompt, step)]
        c = row_factor(ROW_KEY)
        return sum(token_term(c, position, token) for position, token in enumerate(known)) & MASK64

    def assert_tokens_exact(self) -> None:
        """What came is exactly what the model's definition says: none missing, none twice."""
        assert self.result_steps == list(range(1, len(self.result_steps) + 1))
        assert self.tokens == scripted_tokens(self.row.prompt, len(self.tokens))


def model_with(*faults: Fault, **options: float) -> str:
    """Return the model string of a scripted model that fails as told."""
    return scripted_model(replace(ScriptedOptions(**options), faults=faults))  # type: ignore[arg-type]


@asynccontextmanager
async def forming(
    *, model: str = "scripted", executor: Executor | None = None, **settings: object
) -> AsyncIterator[LiveGroup]:
    """Yield a formed group; at the end tear it down and assert that nothing of it is left."""
    chosen = replace(SETTINGS, model=model, **settings)  # type: ignore[arg-type]
    live = LiveGroup(executor or MultiprocExecutor(world_size=1, settings=WORKER), chosen)
    await live.form()
    pid, directory = live.pid, live.directory
    shm_before = set(os.listdir("/dev/shm"))
    try:
        yield live
    finally:
        await live.group.teardown("the test is over")
    assert len(live.losses) <= 1
    if pid:
        assert not is_alive(pid)
        assert not directory.exists()
        assert set(os.listdir("/dev/shm")) <= shm_before


async def assert_next_group_works() -> None:
    """Form another group and run a few steps."""
    async with forming() as live:
        await live.run_steps(3)
        live.assert_tokens_exact()
        assert not live.losses


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return state_of(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel writes it; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
