"""Before clients hear "lost, start over" a rank must have said that the group is still ours (PROTOCOL D)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from control_plane.group.last_word import Word, kind_of_loss
from control_plane.group.loss import LossKind, LossReason
from control_plane.group.settings import GroupSettings
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import rank_health_pb2
from service_chassis.protocol.failure_kinds import BROKEN_COLLECTIVE
from support.fake_executor import FakeExecutor, FakeRank
from support.waiting import until

OURS, OTHERS, GONE, SILENT = Word.OURS, Word.OTHERS, Word.GONE, Word.SILENT


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([GONE], LossKind.LOST),
        ([GONE, GONE, GONE], LossKind.LOST),
        ([GONE, OURS, SILENT], LossKind.LOST),
        ([SILENT], LossKind.UNPROVEN),
        ([GONE, SILENT], LossKind.UNPROVEN),
        ([OURS, OTHERS], LossKind.FENCED),
        ([GONE, SILENT, OTHERS], LossKind.FENCED),
    ],
)
def test_loss_is_what_the_words_of_the_ranks_prove(words: list[Word], kind: LossKind) -> None:
    assert kind_of_loss(words) is kind


class RemoteRanks(FakeExecutor):
    """Ranks that outlive their owner."""

    outlives_owner = True
    was_let_go = False

    def let_go(self) -> None:
        self.was_let_go = True


async def lose(executor: RemoteRanks, meanwhile: Callable[[FakeRank], None] = lambda survivor: None) -> LossReason:
    """Form a group of ranks, let rank 1 end, and return the loss; ``meanwhile`` is what happens to rank 0 unheard."""
    settings = GroupSettings(model="fake", report_interval_s=0.02, idle_report_interval_s=0.05, heartbeat_timeout_s=2.0)
    group = WorkerGroup(executor, settings, owner_id="owner")
    losses: list[LossReason] = []
    health: list[bool] = []
    group.on_lost = losses.append
    group.on_health = lambda healthy, reason: health.append(healthy)
    await group.form()
    await until(lambda: all(status.connected for status in group.ranks()), "streams")
    executor.fakes[0].mute_health = executor.fakes[0].mute_steps = True
    meanwhile(executor.fakes[0])
    executor.kill(1)
    assert health[-1] is False  # at once, whatever the ranks will say
    assert not losses
    await until(lambda: losses, "the loss")
    await group.teardown("the test is over")
    assert losses == [group.loss]
    assert losses[0].reason == "rank 1 exited: killed by SIGKILL"
    return losses[0]


async def test_group_is_lost_when_a_survivor_says_that_it_is_ours() -> None:
    executor = RemoteRanks(3)
    assert (await lose(executor)).kind is LossKind.LOST
    assert executor.fakes[0].goodbyes  # told to leave
    assert not executor.was_let_go


async def test_group_is_another_owners_when_a_survivor_says_so_and_nothing_is_touched() -> None:
    def is_granted(survivor: FakeRank) -> None:
        survivor.epoch += 1
        survivor.owner_address = "other:1"

    executor = RemoteRanks(2)
    loss = await lose(executor, is_granted)
    assert loss.kind is LossKind.FENCED
    assert loss.owner_address == "other:1"
    assert executor.fakes[0].goodbyes == []
    assert "Leave" not in executor.fakes[0].calls
    assert executor.was_let_go


async def test_nothing_is_proven_when_nobody_answers_and_nobody_is_killed() -> None:
    executor = RemoteRanks(2)
    loss = await lose(executor, lambda survivor: survivor.hanging_calls.add("Describe"))
    assert loss.kind is LossKind.UNPROVEN
    assert executor.was_let_go


@pytest.mark.parametrize(("epoch", "kind"), [(1, LossKind.LOST), (0, LossKind.UNPROVEN)])
async def test_last_report_of_a_rank_that_was_left_alone_is_its_word_when_it_is_gone_too(
    epoch: int, kind: LossKind
) -> None:
    """As behind a proxy, which never says that nobody listens; a word under another epoch proves nothing of ours."""

    def tells_and_goes(survivor: FakeRank) -> None:
        survivor.epoch = epoch
        survivor.failure = rank_health_pb2.RankReport.Failure(kind=BROKEN_COLLECTIVE, message="rank 1 closed")
        survivor.mute_steps = False
        survivor.say(report=survivor.report())
        survivor.mute_steps = True
        survivor.hanging_calls.add("Describe")

    assert (await lose(RemoteRanks(2), tells_and_goes)).kind is kind


async def test_group_is_lost_when_another_process_answers_in_the_place_of_the_last_rank() -> None:
    def is_restarted(survivor: FakeRank) -> None:
        survivor.incarnation_id, survivor.epoch = "another", 0

    assert (await lose(RemoteRanks(2), is_restarted)).kind is LossKind.LOST
