"""Bring the ranks of a dead owner to one step, and see that their batches are one (PROTOCOL C4).

A rank may wait in a collective for a delta that the owner sent to another rank only. So the deltas come from the rank
that is furthest, and are relayed as they are, under the new epoch's envelope. Nothing here has a timer of its own but
the time budget of a step: the watchdog of the new tenure sees whatever else goes wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import DecodeError

from control_plane.executors.base import Executor, RankCallError
from control_plane.group.claim import Grant
from control_plane.group.loss import GroupNotFormed, LossReason
from control_plane.group.settings import GroupSettings
from control_plane.group.step_ledger import SentStep, StepLedger
from control_plane.group.tenure import Tenure
from maniple.v1 import rank_health_pb2, worker_pb2
from maniple.v1.scheduler_delta_pb2 import SampleInput, SchedulerDelta
from service_chassis.errors import ManipleError
from service_chassis.ids import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a formation was left."""

    accepted: Mapping[Rank, int]
    target: int  # what the furthest rank accepted
    state_digest: int  # there, as that rank computed it
    relayed: tuple[tuple[SchedulerDelta, bytes], ...]  # what some rank lacks, or has not completed

    def ledger(self, grant: Grant, now: float) -> StepLedger:
        """Return a ledger from which ``RankStream`` sends each rank what it lacks."""
        lowest = min(self.accepted.values())
        return StepLedger.taken_over(
            self.accepted,
            [
                SentStep(delta.step, worker_pb2.StepsRequest(epoch=grant.epoch, delta=raw), False, 0, now)
                for delta, raw in self.relayed
                if delta.step > lowest
            ],
        )

    def begin(self, tenure: Tenure) -> None:
        """Give the new tenure what it must compare ranks with, and release rows whose masks died."""
        for delta, _ in self.relayed:
            tenure.expect_state_digest(delta.step, delta.state_digest)
            if delta.awaits_mask:
                tenure.send_sample_input(SampleInput(step=delta.step, req_indices=delta.awaits_mask, void=True))
        tenure.expect_state_digest(self.target, self.state_digest)


async def find_standing(executor: Executor, grant: Grant, *, timeout_s: float) -> Standing:
    """Fetch from the furthest rank what others lack, or have not completed.

    Raises:
        RankCallError: it does not answer.
        GroupNotFormed: its ring does not reach back far enough.
    """
    joined = grant.joined
    accepted = {rank: reply.accepted for rank, reply in joined.items()}
    furthest = max(accepted, key=lambda rank: (accepted[rank], -rank))
    target, lowest = accepted[furthest], min(accepted.values())
    since = min(reply.completed for reply in joined.values())
    relayed: list[tuple[SchedulerDelta, bytes]] = []
    if since < target:
        request = worker_pb2.FetchDeltasRequest(epoch=grant.epoch, from_step=since + 1)
        try:
            reply = await executor.call(furthest, "FetchDeltas", request, timeout_s=timeout_s)
        except (ManipleError, ConnectionError, TimeoutError) as error:
            raise RankCallError(furthest, "FetchDeltas", str(error) or "no answer", error=error) from error
        relayed = _parse(cast("worker_pb2.FetchDeltasResponse", reply), furthest)
    steps = [delta.step for delta, _ in relayed]
    if steps != list(range(target + 1 - len(steps), target + 1)) or len(steps) < target - lowest:
        reason = f"rank {furthest} gave steps {steps} to relay; needed are {lowest + 1} to {target}"
        raise GroupNotFormed(LossReason(furthest, reason))
    return Standing(
        accepted=accepted, target=target, state_digest=joined[furthest].state_digest, relayed=tuple(relayed)
    )


def _parse(reply: worker_pb2.FetchDeltasResponse, rank: Rank) -> list[tuple[SchedulerDelta, bytes]]:
    try:
        return [(SchedulerDelta.FromString(raw), raw) for raw in reply.deltas]
    except DecodeError:
        raise GroupNotFormed(LossReason(rank, f"rank {rank} gave bytes that are no delta")) from None


async def reach_level(tenure: Tenure, standing: Standing, ranks: tuple[Rank, ...], settings: GroupSettings) -> int:
    """Wait until every rank completed what the furthest accepted; return the token digest they agree on.

    Raises:
        GroupNotFormed: a rank gets no further, or their batches differ.
    """
    completed: dict[Rank, int] = {}
    while True:
        try:
            async with asyncio.timeout(settings.step_timeout_s):
                latest = await _progress(tenure, completed)
        except TimeoutError:
            behind = min(ranks, key=lambda rank: (completed.get(rank, -1), rank))
            reason = f"rank {behind} completed step {completed.get(behind, 0)} and gets no further"
            raise GroupNotFormed(LossReason(behind, f"{reason} (to reach: step {standing.target})")) from None
        reports = [latest[rank] for rank in ranks if rank in latest]
        if len(reports) == len(ranks) and all(_is_level(report, standing.target) for report in reports):
            if len({(report.state_digest, report.token_digest) for report in reports}) > 1:
                reason = f"the ranks diverged: their digests after step {standing.target} differ"
                raise GroupNotFormed(LossReason(None, reason))
            return reports[0].token_digest


async def _progress(tenure: Tenure, completed: dict[Rank, int]) -> Mapping[Rank, rank_health_pb2.RankReport]:
    """Wait until some rank got further, or was heard for the first time."""
    while True:
        latest = await tenure.news()
        got = {rank: report.completed for rank, report in latest.items()}
        if got != completed:
            completed.clear()
            completed.update(got)
            return latest


def _is_level(report: rank_health_pb2.RankReport, target: int) -> bool:
    return report.accepted == report.completed == target
