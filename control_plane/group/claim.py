"""Ask the ranks of a group for an epoch: rank 0 first, and only who holds rank 0 asks the others (PROTOCOL C1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError
from control_plane.executors.collective import start_on_all
from control_plane.group.loss import GroupNotFormed, LossReason
from control_plane.group.settings import GroupSettings
from maniple.v1 import worker_pb2
from service_chassis.errors import Fenced, LeaseHeld
from service_chassis.ids import Epoch, Rank
from service_chassis.protocol.version import (
    FEATURE_FULL_SAMPLING,
    FEATURE_LOGPROBS,
    FEATURE_MASKS,
    FEATURE_POOLING,
    FEATURE_SLEEP,
    FEATURE_SPECULATION,
    MAX_PROTOCOL_VERSION,
    MIN_PROTOCOL_VERSION,
)
from service_chassis.telemetry import get_logger

log = get_logger()

_FEATURES = [
    FEATURE_FULL_SAMPLING,
    FEATURE_LOGPROBS,
    FEATURE_MASKS,
    FEATURE_POOLING,
    FEATURE_SLEEP,
    FEATURE_SPECULATION,
]

# The leases of the ranks of one owner lapse within a report interval of each other.
_JOIN_RETRY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """All ranks granted the epoch. What they said of themselves then."""

    epoch: Epoch
    incarnations: Mapping[Rank, str]
    features: frozenset[str]  # those that every rank has; another one is not used
    joined: Mapping[Rank, worker_pb2.JoinResponse]
    described: Sequence[worker_pb2.DescribeResponse]  # before they joined, in rank order


class HeldByOther(Exception):
    """Another owner lives, or was quicker."""

    def __init__(self, reason: str, owner_address: str = "") -> None:
        super().__init__(reason)
        self.owner_address = owner_address  # where it answers clients; empty where nobody said


async def describe_all(executor: Executor, timeout_s: float) -> list[worker_pb2.DescribeResponse]:
    """Ask all ranks what they are. Raises ``RankCallError``."""
    replies = await executor.collective_rpc("Describe", worker_pb2.DescribeRequest(), timeout_s=timeout_s)
    return cast("list[worker_pb2.DescribeResponse]", replies)


async def claim(executor: Executor, settings: GroupSettings, *, owner_id: str, left_s: Callable[[], float]) -> Grant:
    """Get a new epoch from every rank.

    Args:
        executor: started.
        settings: of the group.
        owner_id: of this control plane.
        left_s: seconds that calls may still take.

    Raises:
        HeldByOther: a rank has another owner. What was granted before it was asked lapses by itself.
        GroupNotFormed: no common version of the protocol.
        RankCallError: a rank cannot be reached, or refused for another reason.
    """
    described = await describe_all(executor, left_s())
    version = common_version(described)
    epoch = Epoch(max(description.epoch for description in described) + 1)
    joined: dict[Rank, worker_pb2.JoinResponse] = {}
    first, *others = executor.ranks
    for ranks in ((first,), tuple(others)):
        if ranks:
            # Who holds rank 0 is waited for by everybody else, so the others need not be asked only once.
            patience_s = min(settings.lease_s, left_s()) if joined else 0.0
            calls = {
                rank: _join(executor, settings, rank, epoch, owner_id, version, left_s(), patience_s) for rank in ranks
            }
            try:
                replies = await start_on_all("Join", calls, timeout_s=left_s() + patience_s)
            except RankCallError as error:
                if isinstance(error.error, LeaseHeld | Fenced):
                    where = error.error.metadata.get("owner_address", "")
                    raise HeldByOther(error.error.message, where) from error
                raise
            joined |= zip(ranks, cast("list[worker_pb2.JoinResponse]", replies), strict=True)
    features = frozenset.intersection(*(frozenset(reply.features) for reply in joined.values()))
    log.info("epoch.held", epoch=epoch, owner_id=owner_id, num_ranks=len(joined), features=sorted(features))
    return Grant(
        epoch=epoch,
        incarnations={rank: reply.incarnation_id for rank, reply in joined.items()},
        features=features,
        joined=joined,
        described=described,
    )


def common_version(described: Sequence[worker_pb2.DescribeResponse]) -> int:
    """Return the highest version of the protocol that all ranks speak. Raises ``GroupNotFormed``."""
    for rank, description in enumerate(described):
        lowest, highest = description.min_protocol_version, description.max_protocol_version
        if highest < MIN_PROTOCOL_VERSION or lowest > MAX_PROTOCOL_VERSION:
            ours = f"{MIN_PROTOCOL_VERSION} to {MAX_PROTOCOL_VERSION}"
            reason = f"rank {rank} speaks versions {lowest} to {highest} of the protocol, and we speak {ours}"
            raise GroupNotFormed(LossReason(Rank(rank), reason))
    return min(MAX_PROTOCOL_VERSION, *(description.max_protocol_version for description in described))


async def _join(
    executor: Executor,
    settings: GroupSettings,
    rank: Rank,
    epoch: Epoch,
    owner_id: str,
    version: int,
    timeout_s: float,
    patience_s: float,
) -> Message:
    """Ask one rank; while a lease that is about to lapse is held there, ask again for ``patience_s``."""
    request = worker_pb2.JoinRequest(
        epoch=epoch,
        owner_id=owner_id,
        owner_address=settings.owner_address,
        protocol_version=version,
        features=_FEATURES,
        rank=rank,
        world_size=executor.world_size,
        lease_ms=int(settings.lease_s * 1000),
    )
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + patience_s
    while True:
        try:
            return await executor.call(rank, "Join", request, timeout_s=timeout_s)
        except LeaseHeld:
            if loop.time() >= give_up_at:
                raise
            await asyncio.sleep(_JOIN_RETRY_S)
