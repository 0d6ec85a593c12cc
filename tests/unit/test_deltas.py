"""Plans to bytes and results back; both digests by the formulas of the protocol, from scratch."""

import pytest

from control_plane.deltas import DeltaEncoder, RowPayload, row_payload, step_tokens
from control_plane.generation import SamplingChoice
from control_plane.scheduling.plan import ResultMismatch
from control_plane.scheduling.request import FinishReason, SampleState
from maniple.v1.scheduler_delta_pb2 import RowFinished, SchedulerDelta, StepResult
from service_chassis.ids import RequestId
from service_chassis.protocol.digest import MASK64, block_term, row_factor, token_term
from support.slot_hash_worker import Bench, make_request


def prompt(length, first=1):
    return [(first + 7 * place) % 97 for place in range(length)]


def watched(bench):
    """Return a list that fills with (delta as read, its bytes, plan)."""
    seen = []
    bench.on_plan = lambda plan, raw: seen.append((SchedulerDelta.FromString(raw), raw, plan))
    return seen


def digest_from_scratch(scheduler):
    total = 0
    for request in scheduler.requests():
        for sample in request.samples:
            if sample.state in (SampleState.PREFILL, SampleState.DECODE):
                c = row_factor(sample.row_key)
                total += c * scheduler.num_computed_tokens(sample)
                total += sum(block_term(c, 0, index, block) for index, block in enumerate(sample.block_ids))
    return total & MASK64


def test_state_digest_of_every_delta_is_the_formula_over_the_batch_after_it():
    bench = Bench(num_blocks=21, max_model_len=60, max_steps_in_flight=2)
    checked = 0

    def check(plan, raw):
        nonlocal checked
        assert SchedulerDelta.FromString(raw).state_digest == digest_from_scratch(bench.scheduler)
        checked += 1

    bench.on_plan = check
    for number in range(12):
        bench.add(make_request(f"r{number}", prompt(5 + 3 * number % 20, number), 17, n=1 + number % 3))
    bench.run()
    assert checked > 50
    assert bench.scheduler.num_preemptions
    bench.check_empty()


def test_token_digest_is_the_formula_over_what_the_worker_knows():
    bench = Bench(num_blocks=21, max_model_len=60, max_steps_in_flight=4)
    requests = [
        bench.add(make_request(f"r{n}", prompt(5 + n, n), 17, n=1 + n % 3, stop_ids=frozenset(range(0, 97, 9))))
        for n in range(12)
    ]
    values = []
    take = bench.encoder.take_tokens

    def taking(plan, tokens):
        value = take(plan, tokens)
        keys = {row: facts[0] for row, facts in rows.items()}
        known = {row: bench.worker.known_tokens(row) for row in bench.worker._rows}
        expected = sum(
            token_term(row_factor(bench.worker._rows[row].new.row_key), place, token)
            for row, tokens_known in known.items()
            for place, token in enumerate(tokens_known)
        )
        assert value == expected & MASK64
        values.append(keys)
        return value

    rows: dict[int, tuple[int]] = {}
    bench.encoder.take_tokens = taking
    bench.run()
    assert len(values) > 50
    bench.check_outputs(requests)


def test_both_digests_hold_when_rows_are_many():
    bench = Bench(max_num_seqs=150, max_num_batched_tokens=600, num_blocks=900)  # ``check`` compares both
    requests = [bench.add(make_request(f"r{n}", prompt(1 + n % 9, n), 1 + n % 11)) for n in range(220)]
    bench.run()
    assert max(len(plan.rows) for plan in bench.plans) > 130
    bench.check_outputs(requests)
    bench.check_empty()


def test_steady_delta_is_a_few_bytes_and_names_no_row():
    bench = Bench(block_size=16, num_blocks=99)
    seen = watched(bench)
    for number in range(7):
        bench.add(make_request(f"r{number}", prompt(3, number), 40))
    bench.turn()
    bench.turn()
    delta, raw, plan = seen[-1]
    assert len(plan.rows) == 7
    assert not (delta.changes)
    assert not (delta.new_requests)
    assert not (delta.finished)
    assert not (delta.preempted)
    assert delta.mode == SchedulerDelta.MODE_RUN
    assert len(raw) <= 16


def test_new_row_carries_all_that_a_worker_must_know():
    sampling = SamplingChoice(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        seed=2**63 + 5,
        min_tokens=2,
        eos_ids=frozenset({9, 3}),
        stop_token_ids=frozenset({7}),
        logit_bias=((5, 1.5), (6, -2.0)),
        allowed_token_ids=(8, 1),
        bad_words=((1, 2), (3,)),
        num_logprobs=0,
        num_prompt_logprobs=None,
    )
    bench = Bench()
    seen = watched(bench)
    request = make_request("a", prompt(9), 3, cache_namespace=b"n" * 16, deadline=2.0)
    request.payload = row_payload(sampling, b"opaque")
    bench.add(request)
    bench.send(0.5)
    new = seen[0][0].new_requests[0]
    assert (new.req_index, new.request_id, new.sample_index, new.n) == (0, "a", 0, 1)
    assert list(new.token_ids) == prompt(9)
    assert (new.num_prompt_tokens, new.num_computed_tokens, new.num_prefill_tokens) == (9, 0, 9)
    assert new.num_scheduled_tokens == 9
    assert [change.WhichOneof("change") for change in new.blocks] == ["replace"]
    assert list(new.blocks[0].replace.ids) == list(seen[0][2].new_rows[0].block_ids)
    assert (new.deadline_ms, new.cache_namespace, new.control_blob) == (1500, b"n" * 16, b"opaque")
    sent = new.sampling
    assert (sent.seed, sent.top_k, sent.min_tokens) == (2**63 + 5, 40, 2)
    assert [sent.temperature, sent.top_p, sent.min_p] == pytest.approx([0.7, 0.9, 0.05])
    assert [sent.repetition_penalty, sent.presence_penalty, sent.frequency_penalty] == pytest.approx([1.1, 0.2, -0.3])
    assert list(sent.stop_ids) == [3, 7, 9]
    assert (list(sent.logit_bias_ids), list(sent.logit_bias_values)) == ([5, 6], [1.5, -2.0])
    assert list(sent.allowed_token_ids) == [1, 8]
    assert [list(word.token_ids) for word in sent.bad_words] == [[1, 2], [3]]
    assert (sent.num_logprobs_plus_one, sent.num_prompt_logprobs_plus_one) == (1, 0)


def test_reasons_and_forgetting_reach_the_wire():
    bench = Bench(max_steps_in_flight=1)
    seen = watched(bench)
    for name in "abc":
        bench.add(make_request(name, prompt(5, ord(name)), 2 if name == "c" else 30))
    bench.turn()
    bench.scheduler.finish(RequestId("a"), FinishReason.ABORT)
    bench.scheduler.finish(RequestId("b"), FinishReason.DEADLINE)
    bench.turn()
    bench.scheduler.forget_prefix_cache()
    bench.flush()
    assert [(f.req_index, f.reason) for delta, _, _ in seen for f in delta.finished] == [
        (0, RowFinished.REASON_ABORT),
        (1, RowFinished.REASON_DEADLINE),
        (2, RowFinished.REASON_LENGTH),
    ]
    assert [delta.forget_prefix_cache for delta, _, _ in seen] == [False, False, True]
    assert seen[-1][0].mode == SchedulerDelta.MODE_APPLY_ONLY


def test_same_plans_give_the_same_bytes():
    raws = []
    for _ in range(2):
        bench = Bench(num_blocks=21, max_model_len=60)
        seen = watched(bench)
        for number in range(6):
            bench.add(make_request(f"r{number}", prompt(9, number), 20))
        bench.run()
        raws.append([raw for _, raw, _ in seen])
    assert raws[0] == raws[1]


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (StepResult(step=2, token_ids=[1]), "result of step 2 read against the plan of step 1"),
        (StepResult(step=1, token_ids=[1, 2]), "step 1: 2 tokens for 1 rows that sample"),
        (StepResult(step=1, token_ids=[1, 2], num_tokens=[2]), "row 0 yields 2 tokens, which nobody asked for"),
        (StepResult(step=1, token_ids=[], num_tokens=[0]), "row 0 yields 0 tokens, which nobody asked for"),
        (StepResult(step=1, token_ids=[1, 2], num_tokens=[1]), "step 1: 2 tokens for 1 rows that sample"),
        (StepResult(step=1, token_ids=[1, 2], num_tokens=[1, 1]), "step 1: 2 tokens for 1 rows that sample"),
    ],
    ids=["other-step", "other-rows", "several-tokens", "no-token", "more-than-counted", "more-rows"],
)
def test_result_that_does_not_fit_its_plan_is_refused(result, sentence):
    bench = Bench()
    bench.add(make_request("a", prompt(5), 3))
    plan = bench.send()
    with pytest.raises(ResultMismatch, match=sentence):
        step_tokens(result, plan)
    assert step_tokens(StepResult(step=1, token_ids=[4]), plan).token_ids == [4]


def test_encoder_insists_on_its_payload():
    bench = Bench()
    request = make_request("a", prompt(5), 3)
    assert isinstance(request.payload, RowPayload)
    request.payload = {"temperature": 1}
    bench.scheduler.add(request)
    plan = bench.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="row_payload"):
        DeltaEncoder().encode(plan)
