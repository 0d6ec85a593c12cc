"""What is reported of scores: against torch's log_softmax and Python's sort, for arrays and for tensors alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from service_chassis.protocol.logprobs import Logprobs
from worker_service.sampling.logprobs import (
    PROMPT_SLICE,
    AskedLogprobs,
    OutputLogprobs,
    ScoreReport,
    StepLogprobs,
    prompt_spans,
    report_arrays,
)
from worker_service.sampling.tensor_logprobs import report_tensors
from worker_service.step_work import PROCESSED_LOGPROBS, RAW_LOGITS, RAW_LOGPROBS, Mode, RowSampling, StepWork

VOCAB = 1013
ReportOf = Callable[[Tensor, list[int], int, bool], ScoreReport]


def of_arrays(scores: Tensor, tokens: list[int], k: int, normalize: bool) -> ScoreReport:
    return report_arrays(scores.numpy(), np.array(tokens, np.int32), k, normalize)


def of_tensors(scores: Tensor, tokens: list[int], k: int, normalize: bool) -> ScoreReport:
    return report_tensors(scores, np.array(tokens, np.int32), k, normalize)


@pytest.fixture(params=[of_arrays, of_tensors], ids=["arrays", "tensors"])
def report(request: pytest.FixtureRequest) -> ReportOf:
    torch.set_num_threads(1)
    return request.param  # type: ignore[no-any-return]


def random_scores(num_rows: int, *, seed: int = 0) -> Tensor:
    return torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 4


def in_order(scores: Tensor) -> list[int]:
    """Return all ids, the likeliest first, the lower first of equals."""
    return sorted(range(len(scores)), key=lambda one: (-float(scores[one]), one))


@pytest.mark.parametrize("k", [0, 1, 7, 20])
def test_the_token_comes_first_then_the_likeliest(report: ReportOf, k: int) -> None:
    scores, tokens = random_scores(5), [3, 500, 7, VOCAB - 1, 0]
    tokens[2] = int(scores[2].argmax())
    said = report(scores.clone(), tokens, k, True)
    assert said.token_ids.shape == said.values.shape == (5, k + 1)
    for place, token in enumerate(tokens):
        order = in_order(scores[place])
        assert said.token_ids[place].tolist() == [token, *order[:k]]
        assert said.ranks[place] == 1 + order.index(token)
        expected = torch.log_softmax(scores[place].double(), 0)[said.token_ids[place].tolist()]
        np.testing.assert_allclose(said.values[place], expected.numpy(), rtol=2e-6, atol=2e-6)


def test_raw_scores_are_reported_as_they_are(report: ReportOf) -> None:
    scores = random_scores(2, seed=1)
    said = report(scores, [9, 12], 3, False)
    for place in range(2):
        assert said.values[place].tolist() == scores[place][said.token_ids[place].tolist()].tolist()


def test_the_lower_of_equals_is_likelier_and_its_rank_says_so(report: ReportOf) -> None:
    scores = torch.zeros(2, VOCAB)
    scores[0, [40, 11, 90, 500]] = 2.0
    scores[0, 77] = 5.0
    said = report(scores, [90, 3], 3, True)  # the boundary of the three lies among equals
    assert said.token_ids.tolist() == [[90, 77, 11, 40], [3, 0, 1, 2]]
    assert said.ranks.tolist() == [4, 4]


def test_masked_ids_are_impossible_and_the_others_share_everything(report: ReportOf) -> None:
    scores = torch.full((2, VOCAB), -torch.inf)
    scores[0, [8, 5]] = torch.tensor([1.0, 1.0])
    said = report(scores, [8, 0], 3, True)  # nothing at all is left of the second row
    assert said.token_ids[0].tolist() == [8, 5, 8, 0]
    assert said.values[0].tolist() == pytest.approx([-math.log(2), -math.log(2), -math.log(2), -math.inf])
    assert (said.values[1] == -math.inf).all()


def test_what_a_row_gets_does_not_depend_on_the_others() -> None:
    scores = random_scores(70, seed=2)
    tokens = torch.randint(VOCAB, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for kind in (of_arrays, of_tensors):
            together = kind(scores, tokens, 5, True)
            for place in (0, 33, 69):
                alone = kind(scores[place : place + 1], tokens[place : place + 1], 5, True)
                assert alone.columns(0, 1, 5) == together.columns(place, place + 1, 5)
    torch.set_num_threads(1)


def asked(**sampling: object) -> AskedLogprobs:
    found = AskedLogprobs.of(RowSampling(**sampling))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_each_row_is_told_of_the_scores_and_as_many_as_it_asked_for() -> None:
    rows = np.array([1, 4, 5, 9, 11], np.int32)
    asks = {
        1: asked(num_logprobs=2),
        5: asked(num_logprobs=0, logprobs_mode=RAW_LOGITS),
        9: asked(num_prompt_logprobs=4),  # of its prompt alone
        11: asked(num_logprobs=3, logprobs_mode=PROCESSED_LOGPROBS),
    }
    noting = OutputLogprobs(asks, rows)
    raw, processed = random_scores(5, seed=4), random_scores(5, seed=5)
    scores = raw.clone()
    noting.note_raw(scores)
    scores[:] = processed  # in place, as the sampler changes them
    noting.note_processed(scores)
    scores.zero_()
    chosen = np.array([10, 20, 30, 40, 50], np.int32)
    found = noting.take(chosen, report_tensors)
    assert noting.shapes == [(0, 1, 2), (2, 5, 0), (4, 11, 3)]
    assert {row: one.width for row, one in found.items()} == {1: 3, 5: 1, 11: 4}
    assert found[1] == of_tensors(raw[:1], [10], 2, True).columns(0, 1, 2)
    assert found[5].values[0] == raw[2, 30]
    assert found[11] == of_tensors(processed[4:], [50], 3, True).columns(0, 1, 3)


def test_what_one_rank_decided_reads_the_same_on_every_rank() -> None:
    rows = np.array([1, 2, 4], np.int32)
    work = StepWork(
        step=1,
        mode=Mode.RUN,
        rows=rows,
        num_computed_tokens=np.array([6, 0, 3], np.int32),
        num_scheduled_tokens=np.array([1, 5, 2], np.int32),
        samples=np.array([True, False, True]),
    )
    asks = {1: asked(num_logprobs=1), 2: asked(num_prompt_logprobs=0), 4: asked(num_logprobs=0, num_prompt_logprobs=2)}
    num_prompt = np.array([0, 6, 9, 0, 5], np.int32)
    output_rank, other = (
        StepLogprobs({row: replace(one) for row, one in asks.items()}, work, num_prompt) for _ in "ab"
    )
    scores = random_scores(9, seed=6)
    output_rank.output.note_raw(scores[:2])
    chosen = np.array([8, 9], np.int32)
    prompts = [
        of_tensors(scores[2:7], [5, 6, 7, 8, 9], 0, True).columns(0, 5, 0),
        of_tensors(scores[7:8], [4], 2, True).columns(0, 1, 2),
    ]
    raw = output_rank.to_bytes(chosen, output_rank.output.take(chosen, report_tensors), prompts)
    token_ids, told = other.from_bytes(raw)
    assert token_ids.tolist() == [8, 9]
    assert [one.req_index for one in told] == [1, 2, 4]
    assert [one.first_position for one in told] == [0, 1, 4]
    assert (told[0].prompt, told[1].sampled) == (None, None)
    assert told[0].sampled == of_tensors(scores[:1], [8], 1, True).columns(0, 1, 1)
    assert told[1].prompt == prompts[0]
    assert (told[2].sampled, told[2].prompt) == (of_tensors(scores[1:2], [9], 0, True).columns(0, 1, 0), prompts[1])


def test_row_that_got_no_token_is_told_nothing() -> None:
    asks = {1: asked(num_logprobs=1), 2: asked(num_logprobs=1)}
    telling = StepLogprobs(asks, replace(chunks((1, 5, 1), (2, 7, 1)), samples=np.array([True, True])), np.ones(9, int))
    telling.output.note_raw(random_scores(2))
    chosen = np.array([-1, 8], np.int32)
    token_ids, told = telling.from_bytes(telling.to_bytes(chosen, telling.output.take(chosen, report_tensors), []))
    assert token_ids.tolist() == [-1, 8]
    assert [one.req_index for one in told] == [2]


def test_rows_that_did_not_ask_cost_nothing() -> None:
    noting = OutputLogprobs({}, np.array([1, 2], np.int32))
    assert not noting
    noting.note_raw(None)
    noting.note_processed(None)
    assert noting.take(np.zeros(2, np.int32), report_tensors) == {}


def chunks(*spans: tuple[int, int, int]) -> StepWork:
    """Return a step of rows (req_index, computed, scheduled)."""
    rows, computed, scheduled = (np.array(column, np.int32) for column in zip(*spans, strict=True))
    return StepWork(step=1, mode=Mode.RUN, rows=rows, num_computed_tokens=computed, num_scheduled_tokens=scheduled)


def test_every_position_but_the_first_is_told_once() -> None:
    asks = {2: asked(num_prompt_logprobs=1), 6: asked(num_logprobs=1)}
    num_prompt = np.array([0, 0, 10, 0, 0, 0, 10], np.int32)

    def told(*spans: tuple[int, int, int]) -> list[tuple[int, int, int, int]]:
        found = prompt_spans(asks, chunks(*spans), num_prompt)
        return [(one.req_index, one.first_position, one.count, one.first_place) for one in found]

    assert told((1, 3, 1), (2, 0, 4), (6, 0, 4)) == [(2, 1, 4, 1)]  # tokens 0..3 say what 1..4 are worth
    assert told((0, 0, 3), (2, 4, 3)) == [(2, 5, 3, 3)]
    assert told((2, 0, 5)) == []  # preempted: it was told of these
    assert told((1, 0, 1), (2, 5, 7)) == [(2, 8, 2, 3)]  # up to the last of the prompt; the rest is its output
    assert told((2, 12, 1)) == []


def test_a_row_that_shares_its_prompt_tells_nothing_of_it() -> None:
    asks = {3: asked(num_prompt_logprobs=1)}
    assert prompt_spans(asks, chunks((3, 9, 1)), np.array([0, 0, 0, 10], np.int32)) == []


def test_spans_are_computed_in_slices() -> None:
    asks = {0: asked(num_prompt_logprobs=1)}
    (span,) = prompt_spans(asks, chunks((0, 0, 2 * PROMPT_SLICE + 5)), np.array([1000], np.int32))
    assert list(span.slices()) == [
        (0, PROMPT_SLICE),
        (PROMPT_SLICE, 2 * PROMPT_SLICE),
        (2 * PROMPT_SLICE, 2 * PROMPT_SLICE + 5),
    ]


def test_mode_that_was_not_said_is_log_softmax_of_what_the_model_computed() -> None:
    assert asked(num_logprobs=1).mode == RAW_LOGPROBS
    assert AskedLogprobs.of(RowSampling(logprobs_mode=RAW_LOGITS)) is None


def test_columns_come_back_from_bytes_and_messages() -> None:
    columns = report_arrays(random_scores(3).numpy(), np.array([5, 6, 7], np.int32), 2, True).columns(0, 3, 2)
    whole = Logprobs(3, num_unknown=1)
    whole.extend(columns)
    assert Logprobs.from_bytes(whole.to_bytes(), 3) == whole
    message = whole.to_message()
    assert [len(one.token_ids) for one in message.positions] == [0, 3, 3, 3]
    assert message.positions[2].token_ids[0] == 6
    assert Logprobs.from_message(message, 3) == whole
    assert Logprobs.from_message(message) == whole
    assert whole.part(2) == columns.part(1, 3)
    assert [len(piece) for piece in whole.pieces(7)] == [2, 2]
    with pytest.raises(ValueError, match="3 ids, 4 are due"):
        Logprobs.from_message(message, 4)
