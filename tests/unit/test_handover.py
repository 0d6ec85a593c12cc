"""Where a handed-over request is read on, and when that is given up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import pytest

from control_plane.control_blob import ResumeRight
from control_plane.generation import (
    Chunk,
    Cursor,
    Done,
    Event,
    FinishReason,
    Generation,
    SampleFinished,
    SamplingChoice,
    Started,
    TextChoice,
)
from control_plane.generation_stream import GenerationStream
from control_plane.handover import HandoverSettings, NextOwner
from control_plane.live_request import LiveRequest
from control_plane.text.tokenizer import Tokenizer
from service_chassis.errors import (
    DeadlineExceeded,
    GroupLost,
    ManipleError,
    NotReady,
    ResumeLost,
    TakenOver,
    UnknownRequest,
)
from service_chassis.ids import RequestId

SETTINGS = HandoverSettings(step_timeout_s=1, resume_grace_s=3, drain_timeout_s=1)
DONE = Done(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=4, time_to_first_token_s=0, duration_s=1)
ANSWER = [30, 31, 32, 33]

Answer = Callable[[int], AsyncGenerator[Event, None]]  # of a control plane, behind so many tokens


class Others:
    """Other control planes, by address, and what the workers say of who owns them."""

    def __init__(self, *owners: str, **answers: Answer) -> None:
        """``owners`` are said one after the other, the last one from then on; each question takes a second."""
        self.owners = list(owners)
        self.answers = answers
        self.asked: list[tuple[str, int]] = []
        self.now = 100.0

    async def owner(self) -> str:
        self.now += 1
        return self.owners.pop(0) if len(self.owners) > 1 else self.owners[0]

    async def resume(
        self, address: str, request_id: RequestId, right: ResumeRight, cursors: Sequence[Cursor]
    ) -> AsyncGenerator[Event, None]:
        assert (request_id, len(right.token)) == ("r", 16)
        self.asked.append((address, cursors[0].num_tokens))
        async for event in self.answers[address](cursors[0].num_tokens):
            yield event

    def next_owner(self) -> NextOwner:
        return NextOwner(self.owner, self.resume, SETTINGS, clock=lambda: self.now)


async def whole(num_told: int) -> AsyncGenerator[Event, None]:
    yield Started(request_id=RequestId("r"), resume_token="00", num_prompt_tokens=1, num_cached_tokens=0)
    yield Chunk(index=0, token_ids=ANSWER[num_told:])
    yield SampleFinished(index=0, reason=FinishReason.LENGTH, num_output_tokens=4)
    yield DONE


def failing(error: Exception, *, after: int = 0) -> Answer:
    async def answer(num_told: int) -> AsyncGenerator[Event, None]:
        for token_id in ANSWER[num_told : num_told + after]:
            yield Chunk(index=0, token_ids=[token_id])
        raise error

    return answer


async def silent(num_told: int) -> AsyncGenerator[Event, None]:
    if num_told < 0:
        yield DONE


def live_request(n: int = 1) -> LiveRequest:
    generation = Generation(
        request_id=RequestId("r"),
        prompt_token_ids=(1,),
        sampling=SamplingChoice(max_tokens=4, n=n),
        text=TextChoice(skip_text=True),
    )
    live = LiveRequest.of(generation, GenerationStream(generation, lambda: None), Tokenizer.for_scripted(), 0.0)
    live.start(0, 0.0)
    live.push(0, ANSWER[:1], None, None, 0.0)
    return live


async def heard(live: LiveRequest) -> tuple[list[int], list[FinishReason]]:
    """Return all that the client was told."""
    assert live.stream is not None
    live.close(0.0)
    events = [event async for event in live.stream]
    token_ids = [token_id for event in events if isinstance(event, Chunk) for token_id in event.token_ids]
    return token_ids, [event.reason for event in events if isinstance(event, SampleFinished)]


async def test_client_hears_what_comes_behind_its_tokens_at_the_owner_that_shows_up() -> None:
    others, live = Others("", "", "b", b=whole), live_request()
    assert await others.next_owner().read_on(live) is None
    assert others.asked == [("b", 1)]
    assert await heard(live) == (ANSWER, [FinishReason.LENGTH])


MOVES = {
    "not adopted yet": failing(NotReady("soon")),
    "its address is told": failing(NotReady("held", metadata={"owner_address": "c"})),
    "handed over again": failing(TakenOver("again", metadata={"owner_address": "c"}), after=2),
    "taken over": failing(TakenOver("fenced"), after=1),
    "killed": failing(ConnectionError("gone"), after=2),
    "silent": failing(TimeoutError("late")),
    "ended half-way": silent,
}


@pytest.mark.parametrize("answer", MOVES.values(), ids=MOVES)
async def test_request_is_followed_to_whoever_has_it_then(answer: Answer) -> None:
    others, live = Others("b", "c", b=answer, c=whole), live_request()
    assert await others.next_owner().read_on(live) is None
    assert [address for address, _ in others.asked] == ["b", "c"]
    assert await heard(live) == (ANSWER, [FinishReason.LENGTH])


ENDS = {
    "unknown": (UnknownRequest("who?"), GroupLost),
    "did not survive": (ResumeLost("less"), GroupLost),
    "deadline": (DeadlineExceeded("late"), DeadlineExceeded),
    "group lost there": (GroupLost("lost"), GroupLost),
}


@pytest.mark.parametrize(("told", "expected"), ENDS.values(), ids=ENDS)
async def test_end_that_nobody_can_help_is_the_clients(told: ManipleError, expected: type[ManipleError]) -> None:
    others = Others("b", b=failing(told))
    assert type(await others.next_owner().read_on(live_request())) is expected
    assert len(others.asked) == 1


async def test_request_that_nobody_takes_up_ends_taken_over() -> None:
    assert type(await Others("").next_owner().read_on(live_request())) is TakenOver


async def test_owner_that_never_gets_ready_is_given_up() -> None:
    others = Others("b", b=failing(NotReady("soon")))
    assert type(await others.next_owner().read_on(live_request())) is TakenOver
    assert 1 < len(others.asked) <= 3  # as many seconds as resume_grace_s


async def test_sample_that_ended_before_is_not_ended_again() -> None:
    live = live_request(n=2)
    live.push(1, [40], FinishReason.LENGTH, None, 0.0)

    async def both(num_told: int) -> AsyncGenerator[Event, None]:
        yield SampleFinished(index=1, reason=FinishReason.LENGTH, num_output_tokens=1)
        async for event in whole(num_told):
            yield event

    assert await Others("b", b=both).next_owner().read_on(live) is None
    token_ids, reasons = await heard(live)
    assert sorted(token_ids) == sorted([40, *ANSWER])
    assert len(reasons) == 2


async def test_one_question_finds_the_owner_for_all_requests() -> None:
    others = Others("", "", "b", b=whole)
    next_owner = others.next_owner()
    assert await next_owner.address(within_s=60) == "b"
    asked_at = others.now
    for _ in range(3):
        await next_owner.read_on(live_request())
    assert others.now == asked_at
