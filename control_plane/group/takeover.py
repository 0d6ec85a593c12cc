"""Get hold of ranks that somebody else started, and take over what runs on them (PROTOCOL C4).

The order of operations is the protocol's: claim the epoch; see whether all ranks are of one formation; fetch what some
lack and relay it; wait until all completed it and agree; take one rank's snapshot. Whoever does this may die at any
point: nothing here changes a rank in a way that the next owner could not start from again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from control_plane.executors.base import Executor, RankCallError
from control_plane.group.allowance import Allowance
from control_plane.group.batch_snapshot import BatchSnapshot, SnapshotUnreadable, read_snapshot
from control_plane.group.claim import Grant, HeldByOther, claim, describe_all
from control_plane.group.leveling import Standing, find_standing, reach_level
from control_plane.group.loss import GroupNotFormed, LossReason
from control_plane.group.settings import GroupFacts, GroupSettings, ModelOnRanks
from control_plane.group.tenure import Tenure
from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter, ManipleError
from service_chassis.ids import Rank, Step
from service_chassis.telemetry import get_logger

log = get_logger()

# How often a spare looks at a group that it could have. Adds to the time without an owner, and costs a rank little.
POLL_S = 0.1
# A snapshot of a survivor is taken while clients wait to hear what became of them.
_SURVIVOR_TIMEOUT_S = 2.0
_FORMED = worker_pb2.WORKER_STAGE_READY
# What adopting needs beside the ranks' answers to Join may not take longer than this, whatever the start-up deadline.
_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A group that is ready for its next step. ``snapshot`` is None where it was formed anew: there was no batch."""

    facts: GroupFacts
    snapshot: BatchSnapshot | None


async def claim_when_free(
    executor: Executor,
    settings: GroupSettings,
    *,
    owner_id: str,
    allowance: Allowance,
    on_held: Callable[[str, str], None],
    is_over: Callable[[], bool],
) -> Grant:
    """Wait, for as long as it takes, until no other owner lives, and claim the group.

    Args:
        executor: started.
        settings: of the group.
        owner_id: of this control plane.
        allowance: of this control plane; counted in where it claims.
        on_held: told, with a reason and the owner's address, whenever who holds the group has changed.
        is_over: True ends the waiting.

    Raises:
        RankCallError: a rank cannot be reached.
        GroupNotFormed: no common version of the protocol, or it is over.
        InvalidParameter: the ranks are ready with another model.
    """
    said: tuple[str, str] | None = None

    def timeout_s() -> float:
        return min(_CALL_TIMEOUT_S, settings.startup_timeout_s)

    while not is_over():
        described = await describe_all(executor, timeout_s())
        _check_model(described, settings.model)
        held = _holder(described, settings.lease_s)
        if held is None and (reason := allowance.take(owner_id)):
            held = (reason, "")
        if held is None:
            try:
                return await claim(executor, settings, owner_id=owner_id, left_s=timeout_s)
            except HeldByOther as error:
                allowance.give_back(owner_id)
                log.info("claim.refused", owner_id=owner_id, reason=str(error))
                held = (str(error), error.owner_address)
        if said is None or held[1] != said[1]:
            said = held
            on_held(*held)
        await asyncio.sleep(POLL_S)
    raise GroupNotFormed(LossReason(None, "given up while another owner held the group"))


def _check_model(described: Sequence[worker_pb2.DescribeResponse], wanted: str) -> None:
    """Refuse ranks that are ready with another model: they are somebody's, and not ours to end."""
    for rank, description in enumerate(described):
        source = description.model.source
        if description.stage == _FORMED and source != wanted:
            raise InvalidParameter("model", wanted, f"rank {rank} is ready with another model, {source!r}")


def _holder(described: Sequence[worker_pb2.DescribeResponse], lease_s: float) -> tuple[str, str] | None:
    """Say (why, where) another owner seems to hold rank 0, judged without asking for it; None if it may be free.

    A hint and no more: the rank decides, by its own clock and the lease it granted. ``lease_s`` is what we would ask
    for; an owner with a shorter lease is waited for a little longer.
    """
    first = described[0]
    if first.epoch == 0 or not first.owner_address:  # never owned, or its owner said goodbye
        return None
    if first.owner_silent_for_ms >= lease_s * 1000:
        return None
    return f"{first.owner_address} holds epoch {first.epoch}", first.owner_address


def formation_of(grant: Grant) -> str:
    """Return the id of the formation that is ready on all ranks, or nothing."""
    formations = {reply.formation_id for reply in grant.joined.values()}
    is_ready = all(reply.stage == _FORMED for reply in grant.joined.values())
    return formations.pop() if len(formations) == 1 and is_ready else ""


def has_batch(grant: Grant) -> bool:
    """Whether some rank may hold requests: it was ready once, and is not empty."""
    return any(reply.formation_id and (reply.accepted or reply.stage == _FORMED) for reply in grant.joined.values())


def loss_of(grant: Grant) -> LossReason:
    """Name the rank because of which the formation cannot go on."""
    formations = [reply.formation_id for reply in grant.joined.values() if reply.stage == _FORMED]
    kept = max(set(formations), key=formations.count, default="")
    for rank, reply in sorted(grant.joined.items()):
        if reply.stage == worker_pb2.WORKER_STAGE_FAILED:
            return LossReason(rank, f"rank {rank} failed before the takeover")
        if reply.formation_id != kept:
            return LossReason(rank, f"rank {rank} is outside the formation: it restarted")
        if reply.stage != _FORMED:
            return LossReason(rank, f"rank {rank} is not ready")
    return LossReason(None, "the ranks are of several formations")


async def take_over(
    executor: Executor,
    settings: GroupSettings,
    grant: Grant,
    begin_tenure: Callable[[Grant, Standing], Tenure],
    on_stage: Callable[[str], None],
) -> Adopted:
    """Level the ranks up and take a snapshot.

    Args:
        executor: of the ranks.
        settings: what we are configured with; the limits are the group's own.
        grant: of all ranks, all ready and of one formation.
        begin_tenure: opens the streams of a tenure that goes on from a standing.
        on_stage: told what begins.

    Raises:
        RankCallError, GroupNotFormed: it cannot be adopted.
    """
    started_at = time.monotonic()
    _check_weights(grant)
    timeout_s = min(_CALL_TIMEOUT_S, settings.startup_timeout_s)
    on_stage("level up")
    standing = await find_standing(executor, grant, timeout_s=timeout_s)
    tenure = begin_tenure(grant, standing)
    token_digest = await reach_level(tenure, standing, executor.ranks, settings)
    on_stage("snapshot")
    snapshot = await _snapshot(executor, executor.ranks[0], grant.epoch, timeout_s)
    if (snapshot.step, snapshot.state_digest, snapshot.token_digest) != (
        standing.target,
        standing.state_digest,
        token_digest,
    ):
        reason = f"rank 0 gave a snapshot of step {snapshot.step} that is not the batch it reports"
        raise GroupNotFormed(LossReason(Rank(0), reason))
    tenure.expect_token_digest(standing.target, token_digest)
    facts = _facts(executor, settings, grant, standing, time.monotonic() - started_at)
    log.info(
        "group.adopted",
        epoch=grant.epoch,
        formation_id=facts.formation_id,
        step=snapshot.step,
        num_rows=len(snapshot.rows),
        num_tombstones=len(snapshot.buried),
        num_cached_blocks=len(snapshot.cached),
        num_relayed=sum(delta.step > min(standing.accepted.values()) for delta, _ in standing.relayed),
        duration_s=round(facts.formed_in_s, 4),
    )
    return Adopted(facts=facts, snapshot=snapshot)


def _check_weights(grant: Grant) -> None:
    """Refuse ranks of which some took other weights and some did not, since their owner died in between."""
    ours = grant.described[0].weights_path
    for rank, description in enumerate(grant.described):
        if description.weights_path != ours:
            reason = f"rank {rank} has weights from {description.weights_path or 'its model'!r}, and rank 0 others"
            raise GroupNotFormed(LossReason(Rank(rank), reason))


async def _snapshot(executor: Executor, rank: Rank, epoch: int, timeout_s: float) -> BatchSnapshot:
    request = worker_pb2.SnapshotRequest(epoch=epoch)
    try:
        async with asyncio.timeout(timeout_s):
            return await read_snapshot(executor.stream(rank, "Snapshot", request, timeout_s=timeout_s))
    except (ManipleError, ConnectionError, TimeoutError, SnapshotUnreadable) as error:
        raise RankCallError(rank, "Snapshot", str(error) or f"no answer within {timeout_s:g} s", error=error) from error


async def snapshot_of_survivor(executor: Executor, epoch: int, ranks: Iterable[Rank]) -> BatchSnapshot | None:
    """Save what clients may still be told of a batch that is going to be dropped; None if nobody answers."""
    found: BatchSnapshot | None = None
    for rank in ranks:
        try:
            snapshot = await _snapshot(executor, rank, epoch, _SURVIVOR_TIMEOUT_S)
        except RankCallError as error:
            log.info("survivor.silent", rank=rank, reason=error.cause)
            continue
        if found is None or snapshot.step > found.step:
            found = snapshot
    return found


async def dissolve(executor: Executor, grant: Grant, reason: str) -> BatchSnapshot | None:
    """Tell the ranks of a formation that cannot go on to leave; return what a survivor still knew.

    They come back without a formation, started by whoever started them, and can be formed anew.
    """
    inside = [rank for rank, reply in sorted(grant.joined.items()) if reply.formation_id]
    survivors = await snapshot_of_survivor(executor, grant.epoch, inside)
    request = worker_pb2.LeaveRequest(epoch=grant.epoch, reason=reason)
    calls = (executor.call(rank, "Leave", request, timeout_s=_SURVIVOR_TIMEOUT_S) for rank in inside)
    for rank, outcome in zip(inside, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(outcome, BaseException):
            log.info("rank.not_dismissed", rank=rank, reason=str(outcome))
    return survivors


def _facts(
    executor: Executor, settings: GroupSettings, grant: Grant, standing: Standing, duration_s: float
) -> GroupFacts:
    first = grant.described[0]
    # Where only some ranks woke or slept, the next call on all of them finds it done.
    asleep = frozenset(tag for description in grant.described for tag in description.sleeping_tags)
    limits, model = first.limits, first.model
    return GroupFacts(
        epoch=grant.epoch,
        formation_id=formation_of(grant),
        features=grant.features,
        first_step=Step(standing.target + 1),
        device=first.device,
        backend=first.backend,
        model=ModelOnRanks(
            source=model.source,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_position=model.max_position,
            dtype=model.dtype,
            weight_bytes=sum(description.model.weight_bytes for description in grant.described),
            num_kv_groups=model.num_kv_groups,
            hidden_size=model.hidden_size,
        ),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_steps_in_flight=limits.max_steps_in_flight,
        num_speculative_tokens=limits.num_speculative_tokens,
        prompt_lookup_min=limits.prompt_lookup_min,
        prompt_lookup_max=limits.prompt_lookup_max,
        kv_bytes=sum(limits.num_blocks * description.model.block_bytes for description in grant.described),
        step_us_per_token=first.step_us_per_token,
        formed_in_s=duration_s,
        asleep=asleep,
        weights_path=first.weights_path,
    )
