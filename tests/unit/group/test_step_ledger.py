from __future__ import annotations

from control_plane.group.digest_check import DigestCheck
from control_plane.group.step_ledger import Answer, SentStep, StepLedger
from maniple.v1 import worker_pb2
from service_chassis.ids import Rank

R0, R1 = Rank(0), Rank(1)


def sent(step: int, *, run: bool = True) -> SentStep:
    return SentStep(step, worker_pb2.StepsRequest(epoch=1, delta=b"%d" % step), run, 1, float(step))


def ledger(*steps: SentStep) -> StepLedger:
    book = StepLedger((R0, R1))
    for step in steps:
        book.add(step)
    return book


def test_delta_is_kept_until_every_rank_accepted_it() -> None:
    book = ledger(sent(1), sent(2), sent(3))
    assert not book.accept(R0, 3)
    assert [book.message(step) is not None for step in (0, 1, 2, 3, 4)] == [False, True, True, True, False]
    assert book.accept(R1, 2)
    assert book.accepted_by_all == 2
    assert [book.message(step) is not None for step in (1, 2, 3)] == [False, False, True]
    assert book.message(3) is book.message(3)  # the same bytes for every resend


def test_accept_says_nothing_new_when_repeated_or_older() -> None:
    book = ledger(sent(1), sent(2))
    book.accept(R0, 2)
    assert book.accept(R1, 2)
    assert not book.accept(R1, 2)
    assert not book.accept(R1, 1)


def test_results_are_taken_once_and_in_order() -> None:
    book = ledger(sent(1), sent(2, run=False), sent(3), sent(4))
    assert book.answer(3) is Answer.GAP
    assert book.answer(1) is Answer.DUE
    assert book.answer(1) is Answer.DUPLICATE
    assert book.next_result == 3  # an APPLY_ONLY step owes no result
    assert book.answer(3) is Answer.DUE
    assert book.answer(1) is Answer.DUPLICATE
    assert book.answer(5) is Answer.GAP
    assert book.last_result == 3


def test_oldest_outstanding_step_is_the_first_without_answer_or_not_accepted_by_all() -> None:
    book = ledger(sent(1), sent(2, run=False))
    assert getattr(book.oldest, "step", None) == 1
    book.accept(R0, 2)
    book.accept(R1, 1)
    book.answer(1)
    assert getattr(book.oldest, "step", None) == 2  # bookkeeping that rank 1 has not accepted
    book.accept(R1, 2)
    assert book.oldest is None


def test_sample_inputs_are_kept_for_steps_above_completed() -> None:
    book = ledger(sent(1), sent(2), sent(3))
    messages = {step: worker_pb2.StepsRequest(epoch=step) for step in (1, 2, 3)}
    book.add_sample_input(2, messages[2])
    book.add_sample_input(1, messages[1])
    assert book.sample_inputs_above(0) == [messages[1], messages[2]]
    assert book.sample_inputs_above(1) == [messages[2]]
    book.answer(1)
    book.add_sample_input(3, messages[3])
    assert book.sample_inputs_above(0) == [messages[2], messages[3]]


def test_digest_check_names_the_rank_in_either_order() -> None:
    check = DigestCheck("state")
    check.expect(1, 0xAB)
    assert check.report(R0, 1, 0xAB) == ""
    assert "state digest after step 1 is 00000000000000cd, not 00000000000000ab" in check.report(R1, 1, 0xCD)
    assert check.report(R1, 2, 0xEF) == ""  # our own value is not known yet
    assert (check.expect(2, 0xEE) or (None,))[0] == 1


def test_digest_check_ignores_steps_it_has_forgotten() -> None:
    check = DigestCheck("token")
    for step in range(1, 1000):
        check.expect(step, step)
    assert check.report(R0, 1, 12345) == ""
    assert check.report(R0, 999, 12345) != ""
