"""Tokens whose ids come a step late leave no trace: digests, inputs and rows are as of a batch that knows at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service_chassis.protocol.digest import row_factor, token_term
from worker_service.input_batch import InputBatch, PendingTokens, StepInput
from worker_service.step_work import FinishedRow, Mode, NewRow, RowSampling, StepWork, TableChange, TableOp

ROWS, LONGEST = 4, 40


def make_batch() -> InputBatch:
    return InputBatch(max_num_seqs=ROWS, max_model_len=LONGEST, max_num_batched_tokens=60, block_size=4, vocab_size=999)


def new_row(row: int, key: int, tokens: list[int]) -> NewRow:
    return NewRow(
        req_index=row,
        row_key=key,
        request_id="r",
        sample_index=0,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        num_prefill_tokens=len(tokens),
        sampling=RowSampling(),
    )


def digest_of(rows: dict[int, tuple[int, list[int]]]) -> int:
    """Add up the terms one by one, as the protocol's text says: row -> (key, tokens)."""
    terms = (
        token_term(row_factor(key), position, token)
        for key, tokens in rows.values()
        for position, token in enumerate(tokens)
    )
    return sum(terms) & ((1 << 64) - 1)


@dataclass
class Late:
    """A batch whose sampled ids stay on a device for a step."""

    batch: InputBatch = field(default_factory=make_batch)
    last_tokens: list[int] = field(default_factory=lambda: [0] * ROWS)  # on the device
    pending: list[tuple[PendingTokens, list[int]]] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)

    def launch(self, work: StepWork, sampled: list[int]) -> list[int]:
        """Return what the device sees as input."""
        self.batch.apply(work)
        ids = filled(self.batch.prepare(work), self.last_tokens)
        rows = work.rows[work.samples]
        self.pending.append((self.batch.expect(rows), sampled))
        for row, token in zip(rows.tolist(), sampled, strict=True):
            self.last_tokens[row] = token
        return ids

    def settle(self) -> None:
        pending, sampled = self.pending.pop(0)
        self.digests.append(self.batch.settle(pending, np.array(sampled, np.int32)))


def filled(step: StepInput, last_tokens: list[int]) -> list[int]:
    ids: list[int] = step.input_ids.tolist()
    if step.pending_places is not None and step.pending_rows is not None:
        for place, row in zip(step.pending_places.tolist(), step.pending_rows.tolist(), strict=True):
            ids[place] = last_tokens[row]
    return ids


# What becomes of each row in a step, and whether the step before is settled first.
MOVES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["go", "rest", "finish", "replace", "preempt"]), min_size=ROWS, max_size=ROWS),
        st.booleans(),
    ),
    max_size=14,
)


@settings(deadline=None, max_examples=120)
@given(MOVES, st.integers(0, 2**64 - 100), st.randoms(use_true_random=False))
def test_late_tokens_leave_no_trace(moves: list[tuple[list[str], bool]], key: int, random: object) -> None:
    late, reference = Late(), make_batch()
    rows: dict[int, tuple[int, list[int]]] = {}  # row -> (key, known tokens): what the protocol says of them
    expected_digests: list[int] = []
    draw = random.randrange  # type: ignore[attr-defined]
    for number, (fates, settle_first) in enumerate(moves):
        finished, preempted, entering, scheduled = [], [], [], {}
        for row, fate in enumerate(fates):
            if row in rows and (fate in ("finish", "replace") or len(rows[row][1]) + 1 >= LONGEST):
                finished.append(FinishedRow(row, 1, 0))
                del rows[row]
            elif row in rows and fate == "preempt":
                preempted.append(row)
                continue
            if row not in rows and fate in ("go", "replace"):
                tokens = [draw(999) for _ in range(draw(1, 6))]
                rows[row] = (key + number, tokens)
                entering.append(new_row(row, key + number, tokens))
                scheduled[row] = (0, len(tokens))
            elif row in rows and fate == "go":
                count = draw(1, 3)  # more than one: some of them are computed again
                count = min(count, len(rows[row][1]))
                scheduled[row] = (len(rows[row][1]) - count, count)
        order = sorted(scheduled)
        work = StepWork(
            step=number + 1,
            mode=Mode.RUN,
            finished=tuple(finished),
            preempted=tuple(preempted),
            new_rows=tuple(entering),
            table_changes=tuple(TableChange(row, 0, TableOp.REPLACE, tuple(range(1, 11))) for row in order),
            rows=np.array(order, np.int32),
            num_computed_tokens=np.array([scheduled[row][0] for row in order], np.int32),
            num_scheduled_tokens=np.array([scheduled[row][1] for row in order], np.int32),
            samples=np.ones(len(order), np.bool_),
        )
        sampled = [draw(999) for _ in order]
        if len(late.pending) == 2 or (late.pending and settle_first):
            late.settle()
        seen = late.launch(work, sampled)
        reference.apply(work)
        assert seen == reference.prepare(work).input_ids.tolist()
        reference.append(work.rows, np.array(sampled, np.int32))
        for row, token in zip(order, sampled, strict=True):
            rows[row][1].append(token)
        expected_digests.append(digest_of(rows))
        assert reference.token_digest == expected_digests[-1]
    while late.pending:
        late.settle()
    assert late.digests == expected_digests
    assert late.batch.token_digest == reference.token_digest
    for row, (_, tokens) in rows.items():
        assert late.batch.known_tokens(row) == tokens
    for row in rows:
        assert late.batch.prepare(decode(row, len(rows[row][1]))).pending_places is None


def decode(row: int, num_known: int) -> StepWork:
    return StepWork(
        step=99,
        mode=Mode.RUN,
        rows=np.array([row], np.int32),
        num_computed_tokens=np.array([num_known - 1], np.int32),
        num_scheduled_tokens=np.array([1], np.int32),
        samples=np.array([True]),
    )


def test_a_reset_forgets_what_was_to_come() -> None:
    late = Late()
    work = decode(1, 3)
    work = StepWork(
        **{**{name: getattr(work, name) for name in work.__slots__}, "new_rows": (new_row(1, 7, [4, 5, 6]),)}
    )
    late.launch(work, [8])
    late.batch.reset()
    assert late.batch.token_digest == 0
    late.batch.apply(StepWork(1, Mode.APPLY_ONLY, new_rows=(new_row(1, 8, [4]),)))
    assert late.batch.prepare(decode(1, 1)).pending_places is None
