"""Requests are rebuilt from what workers kept: text and ends as an undisturbed owner would have told them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from control_plane.adopted_batch import BatchOfRequests, Continued, requests_of
from control_plane.control_blob import draw_resume_right, write_blob
from control_plane.deltas import row_payload
from control_plane.generation import (
    Chunk,
    Cursor,
    FinishReason,
    Generation,
    PromptLogprobs,
    SamplingChoice,
    Started,
    TextChoice,
)
from control_plane.generation_stream import GenerationStream
from control_plane.group.batch_snapshot import (
    BatchSnapshot,
    BuriedRow,
    KeptLogprobs,
    LeaveReason,
    LiveRow,
    RowStanding,
)
from control_plane.live_request import LiveRequest
from control_plane.scheduling.adoption import SampleEnd
from control_plane.scheduling.request import FinishReason as SchedulerReason
from control_plane.text.model_text import load_model_text
from service_chassis.errors import DeadlineExceeded
from service_chassis.ids import BlockId, ReqIndex, RequestId, RowKey
from service_chassis.protocol.logprobs import Logprobs

TOKENIZER = load_model_text("scripted").tokenizer
PROMPT = tuple(b"once")
RIGHT = draw_resume_right("")
NOW = 1000.0


def generation(*, text: TextChoice | None = None, **sampling: Any) -> Generation:
    return Generation(
        request_id=RequestId("r"),
        prompt_token_ids=PROMPT,
        sampling=SamplingChoice(**{"max_tokens": 50, "temperature": 0.0, "seed": 3, **sampling}),
        text=text or TextChoice(),
        priority=2,
    )


def blob_of(of: Generation, number: int = 1) -> bytes:
    return write_blob(of, row_payload(of.sampling).sampling, arrival_number=number, right=RIGHT)


def row(of: Generation, output: bytes | tuple[int, ...], index: int = 0, **changes: Any) -> LiveRow:
    known = (*of.prompt_token_ids, *output)
    values: dict[str, Any] = {
        "req_index": ReqIndex(index),
        "row_key": RowKey(100 + index),
        "request_id": of.request_id,
        "sample_index": index,
        "n": of.sampling.n,
        "standing": RowStanding.DECODE,
        "token_ids": known,
        "num_prompt_tokens": len(of.prompt_token_ids),
        "num_cached_tokens": 4,
        "num_computed_tokens": len(known) - 1,
        "block_ids": (BlockId(1 + index),),
        "sampling": row_payload(of.sampling).sampling,
        "deadline_s": None,
        "age_s": 2.0,
        "cache_namespace": b"",
        "control_blob": blob_of(of),
    }
    return LiveRow(**{**values, **changes})


def stone(of: Generation, output: bytes, reason: LeaveReason, index: int = 0, **changes: Any) -> BuriedRow:
    values: dict[str, Any] = {
        "request_id": of.request_id,
        "sample_index": index,
        "token_ids": (*of.prompt_token_ids, *output),
        "num_prompt_tokens": len(of.prompt_token_ids),
        "reason": reason,
        "age_s": 5.0,
        "control_blob": blob_of(of),
    }
    return BuriedRow(**{**values, **changes})


def batch(*rows: LiveRow | BuriedRow) -> BatchOfRequests:
    snapshot = BatchSnapshot(
        step=9,
        state_digest=0,
        token_digest=0,
        rows=tuple(one for one in rows if isinstance(one, LiveRow)),
        buried=tuple(one for one in rows if isinstance(one, BuriedRow)),
        cached=(),
    )
    limit_of = lambda request: len(request.prompt_token_ids) + request.max_tokens  # noqa: E731
    return requests_of(snapshot, limit_of=limit_of, tokenizer=TOKENIZER, now=NOW)


def only(*rows: LiveRow | BuriedRow) -> Continued:
    found = batch(*rows)
    assert found.remembered == ()
    (one,) = found.continued
    return one


def told(live: LiveRequest, index: int = 0) -> tuple[list[int], str]:
    sample = live.samples[index]
    return sample.token_ids, "".join(sample.text)


async def everything(live: LiveRequest, *cursors: Cursor) -> list[Any]:
    stream = GenerationStream(live.generation, lambda: None)
    live.attach(stream, cursors)
    return [event async for event in stream]


async def first(live: LiveRequest, count: int, *cursors: Cursor) -> list[Any]:
    """Attach, and take what is there."""
    stream = GenerationStream(live.generation, lambda: None)
    live.attach(stream, cursors)
    return [await anext(stream) for _ in range(count)]


def test_running_request_is_what_it_was() -> None:
    original = generation(
        text=TextChoice(stop=("zebra",), include_stop_str_in_output=True),
        min_tokens=1,
        eos_ids=frozenset({256}),
        stop_token_ids=frozenset({9}),
        temperature=0.5,
    )
    one = only(row(original, b" upon a time", deadline_s=7.0))
    assert one.live.generation == dataclasses.replace(original, deadline=NOW + 7.0, client_resumes=True)
    assert told(one.live) == ([*b" upon a time"], " upon a time")
    assert one.live.num_cached_tokens == 4
    assert one.live.started_at == NOW - 2.0
    assert one.live.stream is None
    request, (adopted,) = one.adopted.request, one.adopted.rows
    assert request.outputs == (tuple(b" upon a time"),)
    assert (request.stop_ids, request.min_tokens, request.priority) == (frozenset({9, 256}), 1, 2)
    assert (adopted.end, adopted.row_key, adopted.block_ids) == (None, 100, (1,))


async def test_time_to_the_first_token_is_unknown_if_it_came_before_the_takeover() -> None:
    before, after = only(row(generation(), b"abc")), only(row(generation(), b""))
    for one in (before, after):
        one.live.push(0, [*b"d"], None, None, NOW + 1.0)
        one.live.abort()
        one.live.close(NOW + 3.0)
    assert before.live.time_to_first_token_s is None
    done = (await everything(before.live))[-1]
    assert (done.time_to_first_token_s, done.duration_s) == (0.0, 5.0)
    assert (await everything(after.live))[-1].time_to_first_token_s == 3.0  # in the batch for 2 s, and 1 s here


def test_stop_string_that_the_dead_owner_had_not_seen_ends_the_sample_and_hides_the_overshoot() -> None:
    original = generation(text=TextChoice(stop=("STOP",)))
    one = only(row(original, b"go on STOP and more"))
    assert told(one.live) == ([*b"go on STOP"], "go on ")
    finished = one.live.samples[0].finished
    assert finished is not None
    assert (finished.reason, finished.matched_stop, finished.num_output_tokens) == (FinishReason.STOP, "STOP", 10)
    assert one.adopted.rows[0].end == SampleEnd(SchedulerReason.STOP, 10)
    assert one.live.is_over


async def test_text_without_a_stop_rule_is_made_when_somebody_reads_it() -> None:
    one = only(row(generation(), "über the".encode()))
    assert told(one.live)[1] == ""  # nobody does yet, and it cannot end the sample
    one.live.push(0, [*b" se"], None, None, NOW)
    started, chunk = await first(one.live, 2, Cursor(index=0, num_tokens=2, num_text_bytes=2))
    assert isinstance(started, Started)
    assert (chunk.token_ids, chunk.text) == ([*b"ber the se"], "ber the se")
    one.live.push(0, [*b"a", 0xC3], None, None, NOW)
    assert told(one.live) == ([*"über the sea".encode(), 0xC3], "über the sea")
    one.live.detach(NOW + 9)
    one.live.push(0, [0xBC, *b"!"], None, None, NOW)
    one.live.push(0, [*b"?"], FinishReason.LENGTH, None, NOW)
    assert told(one.live) == ([*"über the seaü!?".encode()], "über the seaü!?")


@pytest.mark.parametrize("skip_text", [False, True])
async def test_unread_text_of_an_aborted_request_is_whole(skip_text: bool) -> None:
    one = only(row(generation(text=TextChoice(skip_text=skip_text)), b"half"))
    one.live.push(0, [*b" way"], None, None, NOW)
    one.live.abort()
    one.live.close(NOW)
    assert told(one.live) == ([*b"half way"], "" if skip_text else "half way")
    chunk = (await everything(one.live))[1]
    assert (chunk.token_ids, chunk.text) == told(one.live)


def test_text_that_may_begin_a_stop_string_is_held_back_as_before() -> None:
    one = only(row(generation(text=TextChoice(stop=("STOP",))), b"go on STO"))
    assert told(one.live) == ([*b"go on STO"], "go on ")
    one.live.push(0, [ord("P")], None, None, NOW)
    assert one.live.samples[0].reason is FinishReason.STOP


def test_whichever_rule_comes_first_in_the_output_wins() -> None:
    text = TextChoice(stop=("STOP",))
    early = only(row(generation(text=text, stop_token_ids=frozenset({ord("!")})), b"no! STOP"))
    finished = early.live.samples[0].finished
    assert finished is not None
    assert (finished.matched_token_id, finished.matched_stop, finished.num_output_tokens) == (ord("!"), None, 3)
    late = only(row(generation(text=text, stop_token_ids=frozenset({ord("!")})), b"STOP no!"))
    assert late.live.samples[0].finished is not None
    assert late.live.samples[0].finished.matched_stop == "STOP"
    length = only(row(generation(text=text, max_tokens=2), b"no"))
    assert length.adopted.rows[0].end == SampleEnd(SchedulerReason.LENGTH, 2)
    first_tokens = only(row(generation(text=text, min_tokens=4), b"STOP and on"))
    assert first_tokens.adopted.rows[0].end is None


async def test_samples_that_left_run_or_never_began_are_told_apart() -> None:
    original = generation(n=3, max_tokens=6)
    one = only(stone(original, b"first.", LeaveReason.LENGTH, 0), row(original, b"sec", 1))
    assert one.adopted.request.outputs == (None, tuple(b"sec"), ())
    assert [adopted.sample_index for adopted in one.adopted.rows] == [1]
    assert [sample.reason for sample in one.live.samples] == [FinishReason.LENGTH, None, None]
    assert told(one.live, 0) == ([*b"first."], "first.")


def test_request_whose_first_sample_left_before_the_others_began_goes_on() -> None:
    original = generation(n=2, max_tokens=6, temperature=0.75)
    one = only(stone(original, b"first.", LeaveReason.LENGTH, 0))
    assert one.adopted.rows == ()
    assert one.adopted.request.outputs == (None, ())
    assert one.live.generation.sampling == original.sampling  # no row says how, so the blob does


async def test_ended_request_is_told_from_its_tombstones() -> None:
    original = generation(text=TextChoice(stop=("STOP",)), n=2)
    (remembered,) = batch(
        stone(original, b"go STOP", LeaveReason.STOP, 0, age_s=9.0), stone(original, b"cut of", LeaveReason.ABORT, 1)
    ).remembered
    assert (remembered.age_s, remembered.is_free) == (5.0, True)
    live = remembered.tell()
    assert live.right == RIGHT
    assert [sample.reason for sample in live.samples] == [FinishReason.STOP, FinishReason.ABORT]
    assert told(live, 0) == ([*b"go STOP"], "go ")
    events = await everything(live, Cursor(index=0, num_tokens=2, num_text_bytes=2))
    assert events[1].token_ids == [*b" STOP"]
    assert events[1].text == " "
    assert [type(event).__name__ for event in events] == [
        *("Started", "Chunk", "SampleFinished", "Chunk", "SampleFinished", "Done")
    ]


async def test_request_whose_deadline_passed_stays_so() -> None:
    original = generation()
    (remembered,) = batch(stone(original, b"too l", LeaveReason.DEADLINE)).remembered
    assert isinstance(remembered.tell().last, DeadlineExceeded)
    assert not remembered.is_free


def test_aborted_request_and_a_new_one_of_its_id_are_two() -> None:
    old, new = generation(), generation(seed=4)
    other = blob_of(new, 2)
    found = batch(stone(old, b"old", LeaveReason.ABORT), row(new, b"new", control_blob=other))
    assert told(found.continued[0].live)[0] == [*b"new"]
    assert told(found.remembered[0].tell())[1] == "old"
    assert found.last_arrival_number == 2


def test_requests_come_back_in_the_order_in_which_they_arrived() -> None:
    rows = []
    for place, number in enumerate([5, 2, 9]):
        one = dataclasses.replace(generation(), request_id=RequestId(f"r{number}"))
        rows.append(row(one, b"x", req_index=ReqIndex(place), control_blob=blob_of(one, number)))
    found = batch(*rows)
    assert [one.live.generation.request_id for one in found.continued] == ["r2", "r5", "r9"]
    assert found.last_arrival_number == 9


def test_rows_of_an_unreadable_request_leave_and_nobody_may_take_it_up() -> None:
    one = only(row(generation(), b"abc", control_blob=b"from the future"))
    assert one.adopted.rows[0].end == SampleEnd(SchedulerReason.ABORT, 3)
    assert one.live.is_over
    assert one.live.right != RIGHT
    assert batch(stone(generation(), b"abc", LeaveReason.STOP, control_blob=b"")).remembered == ()


def test_survivors_batch_is_readmitted_from_what_counts() -> None:
    original = generation(n=3, text=TextChoice(stop=("STOP",)))
    one = only(row(original, b"go STOP on", 0), row(original, b"still", 1))
    request = one.readmitted()
    assert request.outputs == (None, tuple(b"still"), ())
    assert request.payload == one.adopted.request.payload


def columns(width: int, *ranks: int) -> Logprobs:
    """Positions that can be told apart by their ranks; 0 says nothing."""
    found = Logprobs(width)
    for rank in ranks:
        found.token_ids.extend([rank] * width)
        found.values.extend([-rank / 4] * width)
        found.ranks.append(rank)
    return found


async def test_logprobs_go_on_where_they_were_and_end_where_the_text_ends() -> None:
    original = generation(text=TextChoice(stop=("!",)), num_logprobs=1, num_prompt_logprobs=0)
    kept = KeptLogprobs(columns(2, 1, 2, 3, 4, 5), columns(1, 7, 8, 9))
    one = only(row(original, b"go! on", logprobs=kept))
    assert one.live.samples[0].logprobs == columns(2, 1, 2, 3)  # nothing of the overshoot
    started, of_prompt, chunk, *_ = await everything(ended(one.live))
    assert isinstance(started, Started)
    assert of_prompt == PromptLogprobs(columns=columns(1, 0, 7, 8, 9))
    assert (chunk.token_ids, chunk.logprobs) == ([*b"go!"], columns(2, 1, 2, 3))


async def test_prompt_that_was_half_computed_is_told_to_its_end() -> None:
    kept = KeptLogprobs(columns(2), columns(1, 7))
    one = only(row(generation(num_prompt_logprobs=0), b"", standing=RowStanding.PREFILL, logprobs=kept))
    assert not one.live.has_told_prompt
    assert one.adopted.request.skip_reading_prefix_cache  # it may be preempted, and must compute all of it again
    one.live.note_prompt(3, columns(1, 5))  # beyond what is known: no part of it
    one.live.note_prompt(1, columns(1, 7, 8))  # some of it again
    one.live.note_prompt(3, columns(1, 9))
    one.live.push(0, [1], None, None, NOW)
    assert (await _prompt_of(one.live)) == columns(1, 0, 7, 8, 9)


async def test_what_was_lost_with_a_group_leaves_empty_places() -> None:
    original = generation(num_logprobs=1, num_prompt_logprobs=0)
    kept = KeptLogprobs(columns(2, 0, 0, 3), None)  # the first two tokens came with their row
    one = only(row(original, b"abc", logprobs=kept))
    assert one.live.samples[0].logprobs == columns(2, 0, 0, 3)
    assert (await _prompt_of(one.live)) == columns(1, 0, 0, 0, 0)
    lost = only(row(original, b"abc", logprobs=KeptLogprobs()))
    assert lost.live.samples[0].logprobs == columns(2, 0, 0, 0)


async def test_any_sample_may_have_what_is_known_of_the_prompt() -> None:
    original = generation(n=2, num_prompt_logprobs=0)
    first = stone(original, b"first.", LeaveReason.LENGTH, 0, logprobs=KeptLogprobs(None, columns(1, 7)))
    second = row(original, b"sec", 1, logprobs=KeptLogprobs(None, columns(1, 7, 8, 9)))
    assert (await _prompt_of(only(first, second).live)) == columns(1, 0, 7, 8, 9)


async def test_ended_request_tells_its_logprobs_from_tombstones() -> None:
    original = generation(num_logprobs=1, num_prompt_logprobs=0)
    kept = KeptLogprobs(columns(2, 1, 2), columns(1, 7, 8, 9))
    (remembered,) = batch(stone(original, b"go", LeaveReason.LENGTH, logprobs=kept)).remembered
    live = remembered.tell()
    assert (await _prompt_of(live)) == columns(1, 0, 7, 8, 9)
    chunk = next(event for event in await everything(live, Cursor(index=0, num_tokens=1)) if isinstance(event, Chunk))
    assert (chunk.token_ids, chunk.logprobs) == ([*b"o"], columns(2, 2))
    # Where they were too many to be kept, the tokens alone are left.
    (remembered,) = batch(stone(original, b"go", LeaveReason.LENGTH)).remembered
    assert remembered.tell().samples[0].logprobs is None


def ended(live: LiveRequest) -> LiveRequest:
    if live.last is None:
        live.abort()
        live.close(NOW)
    return live


async def _prompt_of(live: LiveRequest) -> Logprobs:
    (found,) = [event.columns for event in await everything(ended(live)) if isinstance(event, PromptLogprobs)]
    return found
