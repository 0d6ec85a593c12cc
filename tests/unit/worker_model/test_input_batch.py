"""The host's copy of rows and tables, and the flat arrays of a step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service_chassis.protocol.digest import row_factor, token_term
from worker_service.input_batch import InputBatch
from worker_service.step_work import FinishedRow, Mode, NewRow, RowSampling, StepWork, TableChange, TableOp


def make_batch() -> InputBatch:
    return InputBatch(max_num_seqs=6, max_model_len=50, max_num_batched_tokens=40, block_size=4, vocab_size=1000)


def new_row(
    row: int, tokens: list[int], *, key: int | None = None, fork_of: int | None = None, known: int = 0
) -> NewRow:
    return NewRow(
        req_index=row,
        row_key=row if key is None else key,
        request_id="r",
        sample_index=0,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens) or known,
        num_computed_tokens=0,
        num_prefill_tokens=len(tokens) or known,
        sampling=RowSampling(),
        fork_of=fork_of,
    )


def digest_of(rows: dict[int, tuple[int, list[int]]]) -> int:
    """Add up the terms one by one, as the protocol's text says: row -> (key, tokens)."""
    terms = (
        token_term(row_factor(key), position, token)
        for key, tokens in rows.values()
        for position, token in enumerate(tokens)
    )
    return sum(terms) & ((1 << 64) - 1)


def apply(batch: InputBatch, **work: object) -> None:
    batch.apply(StepWork(step=1, mode=Mode.APPLY_ONLY, **work))  # type: ignore[arg-type]


def test_prepare_lays_rows_out_in_order() -> None:
    batch = make_batch()
    apply(
        batch,
        new_rows=(new_row(1, list(range(100, 110))), new_row(4, list(range(200, 203)))),
        table_changes=(
            TableChange(1, 0, TableOp.REPLACE, (7, 3)),
            TableChange(4, 0, TableOp.REPLACE, (9,)),
            TableChange(1, 0, TableOp.APPEND, (5,)),
        ),
    )
    step = batch.prepare(
        StepWork(
            step=2,
            mode=Mode.RUN,
            rows=np.array([1, 4], np.int32),
            num_computed_tokens=np.array([3, 2], np.int32),
            num_scheduled_tokens=np.array([6, 1], np.int32),
            samples=np.array([False, True]),
        )
    )
    assert step.input_ids.tolist() == [103, 104, 105, 106, 107, 108, 202]
    assert step.positions.tolist() == [3, 4, 5, 6, 7, 8, 2]
    assert step.slot_mapping.tolist() == [7 * 4 + 3, 12, 13, 14, 15, 5 * 4, 9 * 4 + 2]
    assert step.query_start_loc.tolist() == [0, 6, 7]
    assert step.seq_lens.tolist() == [9, 3]
    assert step.block_tables.tolist() == [[7, 3, 5], [9, 0, 0]]


def test_tables_of_preempted_and_replaced_rows_name_no_old_block() -> None:
    batch = make_batch()
    apply(batch, new_rows=(new_row(0, [1] * 12),), table_changes=(TableChange(0, 0, TableOp.REPLACE, (7, 8, 9)),))
    apply(batch, preempted=(0,))
    assert not batch.block_tables.any()
    assert batch.known_tokens(0) == [1] * 12
    apply(batch, table_changes=(TableChange(0, 0, TableOp.REPLACE, (4, 5)),))
    apply(batch, table_changes=(TableChange(0, 0, TableOp.DROP_LEADING, value=1),))
    assert batch.block_tables[0].tolist()[:3] == [0, 5, 0]


def test_fork_knows_the_first_tokens_of_its_source() -> None:
    batch = make_batch()
    apply(batch, new_rows=(new_row(0, [5, 6, 7]),))
    batch.append(np.array([0], np.int32), np.array([99], np.int32))
    apply(batch, new_rows=(new_row(2, [], key=8, fork_of=0, known=3),))
    assert batch.known_tokens(2) == [5, 6, 7]
    assert batch.token_digest == digest_of({0: (0, [5, 6, 7, 99]), 2: (8, [5, 6, 7])})


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 999), min_size=1, max_size=9)), max_size=25),
    st.integers(0, 2**64 - 100),
)
def test_digest_is_the_sum_over_known_tokens_after_any_traffic(moves: list[tuple[int, list[int]]], key: int) -> None:
    """A move on a free row enters it; on a live one it appends two tokens, or finishes it where they are equal."""
    batch, rows = make_batch(), {}
    for number, (row, tokens) in enumerate(moves):
        if row not in rows:
            rows[row] = (key + number, list(tokens))
            apply(batch, new_rows=(new_row(row, tokens, key=key + number),))
        elif tokens[0] == tokens[-1] or len(rows[row][1]) > 40:
            del rows[row]
            apply(batch, finished=(FinishedRow(row, 1, 0),))
        else:
            for token in (tokens[0], tokens[-1]):
                rows[row][1].append(token)
                batch.append(np.array([row], np.int32), np.array([token], np.int32))
        assert batch.token_digest == digest_of(rows)
    for row, (_, tokens) in rows.items():
        assert batch.known_tokens(row) == tokens
    batch.reset()
    assert batch.token_digest == 0
    assert not batch.live
