"""What a rank remembers of completed steps, and what it tells of that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from control_plane.group.batch_snapshot import BatchSnapshot, read_snapshot
from maniple.v1 import sampling_pb2, worker_pb2
from maniple.v1.scheduler_delta_pb2 import BlockChange, BlockCopy, BlockIds, NewRequest, RowFinished, SchedulerDelta
from service_chassis.protocol.block_hash import block_hash, root_hash
from service_chassis.protocol.logprobs import Logprobs
from worker_service.batch_rows import BatchLimits
from worker_service.batch_state import BatchState, DigestMismatch
from worker_service.completed_batch import CompletedBatch
from worker_service.snapshot import peer_refusal, snapshot_parts
from worker_service.step_work import RowLogprobs
from worker_service.tombstones import Tombstones

Part = worker_pb2.SnapshotResponse
LIMITS = BatchLimits(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40, block_size=4, num_blocks=30, vocab_size=300
)
GROUP_LIMITS = worker_pb2.GroupLimits(max_num_seqs=4, num_blocks=30, block_size=4)


def new_request(req_index: int, prompt: list[int], blocks: list[int], **fields: Any) -> NewRequest:
    values: dict[str, Any] = {
        "row_key": 100 + req_index,
        "request_id": f"r{req_index}",
        "n": 1,
        "token_ids": prompt,
        "num_prompt_tokens": len(prompt),
        "num_prefill_tokens": len(prompt),
        "num_scheduled_tokens": len(prompt),
        "sampling": sampling_pb2.RowSampling(top_p=1.0, repetition_penalty=1.0, seed=9),
        "control_blob": b"stop strings",
        "blocks": [BlockChange(replace=BlockIds(ids=blocks))],
    }
    return NewRequest(req_index=req_index, **{**values, **fields})


class Told:
    """A batch to which deltas are told and completed; the tokens of a step are said by the test."""

    def __init__(self) -> None:
        self.tombstones = Tombstones()
        self.completed = CompletedBatch(LIMITS, self.tombstones)
        self._state = BatchState(LIMITS)
        self._accepted: list[Any] = []
        self.now = 50.0

    def accept(self, **fields: Any) -> None:
        delta = SchedulerDelta(step=self._state.accepted + 1, **fields)
        # The digest is not this file's business: the one that a state of the same past has.
        probe = BatchState(LIMITS)
        for work in self._accepted:
            probe.apply(work[0])
        with suppress(DigestMismatch):
            probe.apply(delta)
        delta.state_digest = probe.digest
        self._accepted.append((delta, self._state.apply(delta)))
        self.completed.accept(delta.step, delta.new_requests, self.now)

    def complete(self, *token_ids: int, logprobs: Sequence[RowLogprobs] = ()) -> None:
        work = self._accepted[self.completed.step][1]
        self.completed.complete(work, np.array(token_ids, np.int32), 1000 + work.step, self.now, logprobs)

    def run(self, *token_ids: int, logprobs: Sequence[RowLogprobs] = (), **fields: Any) -> None:
        self.accept(**fields)
        self.complete(*token_ids, logprobs=logprobs)

    def parts(self) -> list[Part]:
        frozen, buried = self.completed.freeze(self.now), self.tombstones.all(self.now)
        return list(snapshot_parts(frozen, GROUP_LIMITS, buried, self.tombstones.logprobs()))

    async def read(self) -> BatchSnapshot:
        """Read it as an adopter does, from bytes."""

        async def parts() -> AsyncIterator[Part]:
            for part in self.parts():
                yield Part.FromString(part.SerializeToString())

        return await read_snapshot(parts())

    def rows(self) -> dict[int, Part.Row]:
        return {part.row.request.req_index: part.row for part in self.parts() if part.WhichOneof("part") == "row"}


@pytest.fixture
def told() -> Told:
    return Told()


def test_row_is_told_as_it_entered_with_what_it_knows_by_now(told: Told) -> None:
    entered = new_request(
        2, [5, 6, 7, 8, 9], [3, 4], deadline_ms=9000, sample_index=1, n=3, cache_namespace=b"n" * 16, lora_slot=0
    )
    told.run(11, new_requests=[entered])
    told.now += 2.5
    told.run(12)
    row = told.rows()[2]
    assert (row.state, row.num_computed_tokens, row.age_s) == (Part.ROW_STATE_DECODE, 6, 2.5)
    expected = NewRequest()
    expected.CopyFrom(entered)
    expected.num_scheduled_tokens = 0
    expected.token_ids.extend([11, 12])
    assert row.request == expected


def test_snapshot_is_of_the_completed_step_whatever_was_accepted_after_it(told: Told) -> None:
    told.run(11, new_requests=[new_request(0, [5, 6, 7], [1])])
    before = told.parts()
    told.accept(new_requests=[new_request(1, [5, 6], [2])])
    told.accept(finished=[RowFinished(req_index=0, num_tokens=4)])
    assert told.parts() == before
    header = before[0].header
    assert (header.step, header.token_digest, header.limits) == (1, 1001, GROUP_LIMITS)
    alone = BatchState(LIMITS)
    alone.apply(told._accepted[0][0])
    assert header.state_digest == alone.digest
    told.complete(12, 21)
    told.complete(22)
    assert told.parts()[0].header.step == 3
    assert list(told.rows()) == [1]


def test_frozen_batch_does_not_change_any_more(told: Told) -> None:
    told.run(11, new_requests=[new_request(0, [5, 6, 7], [1])])
    frozen = told.completed.freeze(told.now)
    before = list(snapshot_parts(frozen, None, ()))
    told.run(12, finished=[RowFinished(req_index=0, num_tokens=4)], new_requests=[new_request(0, [1, 1], [1])])
    assert list(snapshot_parts(frozen, None, ())) == before


def test_fork_has_the_tokens_of_its_parent_and_names_it_no_more(told: Told) -> None:
    told.run(11, new_requests=[new_request(0, [5, 6, 7, 8, 9], [1, 2], n=2)])
    fork = new_request(1, [], [1, 3], n=2, sample_index=1, fork_of=0, num_prompt_tokens=5, num_prefill_tokens=5)
    fork.num_computed_tokens, fork.num_scheduled_tokens = 4, 1
    told.run(
        12, 77, new_requests=[fork], block_copies=[SchedulerDelta().block_copies.add(src_block_id=2, dst_block_id=3)]
    )
    rows = told.rows()
    assert list(rows[0].request.token_ids) == [5, 6, 7, 8, 9, 11, 12]
    assert list(rows[1].request.token_ids) == [5, 6, 7, 8, 9, 77]
    assert not rows[1].request.HasField("fork_of")
    assert rows[1].request.num_computed_tokens == 4  # as it entered
    assert rows[1].num_computed_tokens == 5


def test_states_of_rows_are_told(told: Told) -> None:
    half = new_request(0, [5, 6, 7, 8, 9], [1, 2], num_scheduled_tokens=2)
    told.run(21, new_requests=[half, new_request(1, [1, 2], [3])])
    rows = told.rows()
    assert (rows[0].state, rows[0].num_computed_tokens) == (Part.ROW_STATE_PREFILL, 2)
    told.run(preempted=[1])
    rows = told.rows()
    assert (rows[1].state, rows[1].num_computed_tokens) == (Part.ROW_STATE_PREEMPTED, 0)
    assert list(rows[1].request.token_ids) == [1, 2, 21]
    assert not rows[1].request.blocks
    # It comes back with a block, and computes nothing yet.
    change = SchedulerDelta().changes.add(req_index=1, num_prefill_tokens=3, num_scheduled_tokens=0)
    change.blocks.add().replace.ids.append(9)
    told.run(changes=[change])
    rows = told.rows()
    assert (rows[1].state, rows[1].request.num_prefill_tokens) == (Part.ROW_STATE_PREFILL, 3)
    assert list(rows[1].request.blocks[0].replace.ids) == [9]


def test_row_that_comes_back_on_cached_blocks_is_told_with_what_is_computed(told: Told) -> None:
    told.run(21, new_requests=[new_request(0, [5, 6, 7, 8, 9], [1, 2])])
    told.run(preempted=[0])
    assert told.parts()[-1].block_hashes.block_ids == [1]
    change = SchedulerDelta().changes.add(
        req_index=0, num_prefill_tokens=6, num_computed_tokens=4, num_scheduled_tokens=0
    )
    change.blocks.add().replace.ids.extend([1, 3])
    told.run(changes=[change])
    row = told.rows()[0]
    assert (row.state, row.num_computed_tokens) == (Part.ROW_STATE_PREFILL, 4)
    assert told.parts()[-1].WhichOneof("part") == "row"  # the block is held, so its hash is not told
    told.run(mode=SchedulerDelta.MODE_APPLY_ONLY, finished=[RowFinished(req_index=0, num_tokens=6)])
    assert told.parts()[-1].block_hashes.block_ids == [1]  # and was not forgotten meanwhile


def test_row_that_left_is_buried_with_the_tokens_that_count(told: Told) -> None:
    told.run(11, new_requests=[new_request(0, [5, 6], [1], sample_index=2, n=3)])
    told.run(12)
    # The row leaves and another takes its place in the same step.
    leaving = RowFinished(req_index=0, reason=RowFinished.REASON_STOP, num_tokens=3)
    told.run(31, finished=[leaving], new_requests=[new_request(0, [7], [1], request_id="next")])
    told.now += 4
    [stone] = [part.tombstone for part in told.parts() if part.WhichOneof("part") == "tombstone"]
    assert stone == Part.Tombstone(
        request_id="r0",
        sample_index=2,
        token_ids=[5, 6, 11],  # 12 was sampled past the stop
        num_prompt_tokens=2,
        reason=RowFinished.REASON_STOP,
        control_blob=b"stop strings",
        age_s=4.0,
    )
    told.run(mode=SchedulerDelta.MODE_APPLY_ONLY, finished=[RowFinished(req_index=0, num_tokens=2)])
    assert [list(t.token_ids) for t, _ in told.tombstones.all(told.now)] == [[5, 6, 11], [7, 31]]


def test_hashes_of_rows_that_left_are_told_until_they_are_forgotten(told: Told) -> None:
    told.run(11, new_requests=[new_request(0, [5, 6, 7, 8, 9], [1, 2])])
    told.run(mode=SchedulerDelta.MODE_APPLY_ONLY, finished=[RowFinished(req_index=0, num_tokens=6)])
    hashes = told.parts()[-1].block_hashes
    assert (hashes.kv_group, list(hashes.block_ids)) == (0, [1])
    assert hashes.hashes == block_hash(root_hash(b""), [5, 6, 7, 8])
    told.run(mode=SchedulerDelta.MODE_APPLY_ONLY, forget_prefix_cache=True)
    assert told.parts()[-1].WhichOneof("part") == "tombstone"


def test_without_a_batch_the_tombstones_still_answer(told: Told) -> None:
    told.run(11, new_requests=[new_request(0, [5, 6], [1])])
    told.run(mode=SchedulerDelta.MODE_APPLY_ONLY, finished=[RowFinished(req_index=0, num_tokens=3)])
    header, stone = snapshot_parts(None, None, told.tombstones.all(told.now))
    assert header.header == Part.Header()
    assert stone.tombstone.request_id == "r0"


def test_wiped_batch_holds_nothing_of_users(told: Told) -> None:
    told.run(11, new_requests=[new_request(0, [5, 6, 7, 8], [1])])
    told.run(12, finished=[RowFinished(req_index=0, num_tokens=5)], new_requests=[new_request(0, [9], [2])])
    told.completed.wipe()
    assert not told.completed._token_ids.any()
    assert told.completed.freeze(told.now).rows == ()


@pytest.mark.parametrize(
    ("peer", "encrypted", "allowed", "refused"),
    [
        ("unix:", False, False, False),
        ("unix-abstract:x", False, False, False),
        ("ipv4:127.0.0.1:4711", False, False, False),
        ("ipv4:127.8.0.1:4711", False, False, False),
        ("ipv6:%5B::1%5D:4711", False, False, False),
        ("ipv6:[::1]:4711", False, False, False),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4711", False, False, False),
        ("ipv4:10.1.2.3:4711", False, False, True),
        ("ipv6:%5B2001:db8::1%5D:4711", False, False, True),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", False, False, True),
        ("ipv4:10.1.2.3:4711", True, False, False),
        ("ipv4:10.1.2.3:4711", False, True, False),
        ("vsock:2:4711", False, False, True),
        ("", False, False, True),
    ],
)
def test_snapshot_leaves_only_over_connections_that_may_carry_prompts(
    peer: str, encrypted: bool, allowed: bool, refused: bool
) -> None:
    sentence = peer_refusal(peer, encrypted=encrypted, allow_plaintext=allowed)
    assert bool(sentence) is refused
    assert not refused or "--allow-plaintext-snapshot" in sentence


ASKS = sampling_pb2.RowSampling(
    top_p=1.0, repetition_penalty=1.0, seed=9, num_logprobs_plus_one=2, num_prompt_logprobs_plus_one=1
)


def columns(width: int, *ranks: int) -> Logprobs:
    """Positions that can be told apart by their ranks."""
    found = Logprobs(width)
    for rank in ranks:
        found.token_ids.extend([rank] * width)
        found.values.extend([-rank / 4] * width)
        found.ranks.append(rank)
    return found


async def test_logprobs_are_kept_a_position_a_token(told: Told) -> None:
    entered = new_request(2, [5, 6, 7], [3], sampling=ASKS)
    told.run(11, new_requests=[entered], logprobs=[RowLogprobs(2, columns(2, 8), columns(1, 5, 6), 1)])
    told.run(12, logprobs=[RowLogprobs(2, columns(2, 9))])
    (row,) = (await told.read()).rows
    assert row.token_ids == (5, 6, 7, 11, 12)
    assert row.logprobs.output == columns(2, 8, 9)
    assert row.logprobs.prompt == columns(1, 5, 6)
    # What was sampled past the end counts no more than its token does.
    told.run(finished=[RowFinished(req_index=2, num_tokens=4)])
    snapshot = await told.read()
    assert snapshot.rows == ()
    assert snapshot.buried[0].logprobs.output == columns(2, 8)
    assert snapshot.buried[0].logprobs.prompt == columns(1, 5, 6)


async def test_of_output_that_came_with_its_row_nothing_is_known(told: Told) -> None:
    entered = new_request(0, [5, 6, 7, 8], [1], sampling=ASKS, num_prompt_tokens=2)
    told.run(11, new_requests=[entered], logprobs=[RowLogprobs(0, columns(2, 3), columns(1, 4), 1)])
    (row,) = (await told.read()).rows
    assert row.logprobs.output is not None
    assert list(row.logprobs.output.ranks) == [0, 0, 3]


async def test_samples_share_what_is_said_of_their_prompt_and_it_is_told_once(told: Told) -> None:
    prompt = [5, 6, 7, 8, 9]
    told.run(
        11,
        new_requests=[new_request(0, prompt, [1, 2], n=2, sampling=ASKS)],
        logprobs=[RowLogprobs(0, columns(2, 1), columns(1, 2, 3, 4, 5), 1)],
    )
    fork = new_request(1, [], [1, 3], n=2, sample_index=1, fork_of=0, num_prompt_tokens=5, num_prefill_tokens=5)
    fork.num_computed_tokens, fork.num_scheduled_tokens = 4, 1
    fork.sampling.CopyFrom(ASKS)
    copies = [BlockCopy(src_block_id=2, dst_block_id=3)]
    logprobs = [RowLogprobs(0, columns(2, 6)), RowLogprobs(1, columns(2, 7))]
    told.run(12, 21, new_requests=[fork], block_copies=copies, logprobs=logprobs)
    first, second = (await told.read()).rows
    assert (first.logprobs.output, second.logprobs.output) == (columns(2, 1, 6), columns(2, 7))
    assert (first.logprobs.prompt, second.logprobs.prompt) == (columns(1, 2, 3, 4, 5), None)
    told.run(22, finished=[RowFinished(req_index=0, num_tokens=7)], logprobs=[RowLogprobs(1, columns(2, 8))])
    snapshot = await told.read()
    assert snapshot.buried[0].logprobs.prompt is None  # the living one has it
    assert snapshot.rows[0].logprobs.prompt == columns(1, 2, 3, 4, 5)
    told.run(finished=[RowFinished(req_index=1, num_tokens=7)])
    assert (await told.read()).buried[1].logprobs.prompt == columns(1, 2, 3, 4, 5)


async def test_logprobs_travel_in_pieces_that_fit_into_messages(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_service.snapshot._ENTRIES_PER_PART", 4)
    prompt = columns(1, *range(2, 12))
    entered = new_request(0, [5] * 11, [1, 2, 3, 4, 5], sampling=ASKS)
    told.run(1, new_requests=[entered], logprobs=[RowLogprobs(0, columns(2, 3), prompt, 1)])
    for rank in range(4, 8):
        told.run(rank, logprobs=[RowLogprobs(0, columns(2, rank))])
    kinds = [part.WhichOneof("part") for part in told.parts()]
    assert kinds == ["header", "row", *["more_logprobs"] * 5]
    pieces = [part.more_logprobs for part in told.parts()[2:]]
    pieces.insert(0, told.parts()[1].row.logprobs)
    assert [len(one.prompt.positions) for one in pieces] == [4, 4, 2, 0, 0, 0]
    assert [len(one.sampled.positions) for one in pieces] == [0, 0, 0, 2, 2, 1]
    (row,) = (await told.read()).rows
    assert row.logprobs.prompt == prompt
    assert row.logprobs.output == columns(2, 3, 4, 5, 6, 7)
