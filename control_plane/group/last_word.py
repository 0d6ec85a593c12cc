"""Find out, before a lost group's clients are told so, whether the group is still ours (PROTOCOL D, teardown).

Where ranks outlive their owners, another one may have taken the group over while we heard nothing. Then it goes on with
the requests, and "lost, start over" would be wrong: clients are told to resume, and where.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto

from control_plane.executors.base import Executor
from control_plane.group.loss import LossKind, LossReason
from maniple.v1 import worker_pb2
from service_chassis.errors import ManipleError
from service_chassis.ids import Epoch, Rank


class Word(Enum):
    """What is known of one rank after it was asked."""

    OURS = auto()  # it answered that it holds our epoch, or its last report said so and that the group is lost
    OTHERS = auto()  # it granted a higher one
    GONE = auto()  # its process ended, or another one answered in its place
    SILENT = auto()


def kind_of_loss(words: Iterable[Word]) -> LossKind:
    """Return what kind of loss the words of all ranks prove. Pure."""
    words = set(words)
    if Word.OTHERS in words:
        return LossKind.FENCED
    if Word.OURS in words or words == {Word.GONE}:
        return LossKind.LOST
    return LossKind.UNPROVEN


async def confirm(
    loss: LossReason,
    executor: Executor,
    epoch: Epoch,
    incarnations: Mapping[Rank, str],
    *,
    have_told: Container[Rank] = (),
    timeout_s: float,
) -> LossReason:
    """Ask the ranks, all at once, and return the loss as what it turns out to be. One that fenced us stays that.

    Args:
        loss: as the watchdog saw it.
        executor: of the group.
        epoch: our tenure.
        incarnations: of the ranks that are not known to have ended.
        have_told: the ranks whose last report, under our epoch, told of the loss. Behind a proxy nothing else is proof
            when they are gone as well: it answers for them, and never says that nobody listens.
        timeout_s: for an answer. The clients wait for it.
    """
    owners: dict[int, str] = {}  # epoch -> address of its owner

    async def ask(rank: Rank) -> Word:
        try:
            reply = await executor.call(rank, "Describe", worker_pb2.DescribeRequest(), timeout_s=timeout_s)
        except (ManipleError, ConnectionError, TimeoutError):
            return Word.OURS if rank in have_told else Word.SILENT
        assert isinstance(reply, worker_pb2.DescribeResponse)
        if reply.incarnation_id != incarnations[rank]:
            return Word.GONE
        if reply.epoch == epoch:
            return Word.OURS
        owners[reply.epoch] = reply.owner_address
        return Word.OTHERS  # a rank's epoch only grows

    words = await asyncio.gather(*map(ask, incarnations))
    has_ended = [Word.GONE] if len(incarnations) < executor.world_size else []
    kind = loss.kind if loss.kind is LossKind.FENCED else kind_of_loss([*words, *has_ended])
    return replace(loss, kind=kind, owner_address=owners[max(owners)] if owners else "")
