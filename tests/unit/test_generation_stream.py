"""What waits for a slow client: merged, and cut where a message would grow too large."""

from __future__ import annotations

import pytest

from control_plane.generation import Chunk, Generation, PromptLogprobs, SampleFinished, SamplingChoice
from control_plane.generation_stream import GenerationStream
from control_plane.live_request import LiveRequest
from control_plane.text.tokenizer import Tokenizer
from service_chassis.ids import RequestId
from service_chassis.protocol.logprobs import Logprobs

PROMPT = (5, 6)


def columns(*ranks: int) -> Logprobs:
    """Positions of two entries that can be told apart by their ranks."""
    found = Logprobs(2)
    for rank in ranks:
        found.token_ids.extend([rank, rank])
        found.values.extend([-1.0, -2.0])
        found.ranks.append(rank)
    return found


def generation(**sampling: object) -> Generation:
    return Generation(request_id=RequestId("r"), prompt_token_ids=PROMPT, sampling=SamplingChoice(**sampling))  # type: ignore[arg-type]


@pytest.fixture
def stream() -> GenerationStream:
    return GenerationStream(generation(), lambda: None)


@pytest.fixture
def five_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.generation_stream._MAX_CHUNK_ENTRIES", 5)  # two positions of two


async def chunks(stream: GenerationStream, count: int) -> list[tuple[list[int], str, list[int]]]:
    found = []
    for _ in range(count):
        chunk = await anext(stream)
        assert isinstance(chunk, Chunk)
        assert chunk.logprobs is not None
        found.append((chunk.token_ids, chunk.text, list(chunk.logprobs.ranks)))
    assert not stream._pending
    return found


@pytest.mark.usefixtures("five_entries")
async def test_tokens_that_nobody_takes_are_cut_before_their_logprobs_fill_a_message(stream: GenerationStream) -> None:
    for token_id in range(1, 6):
        stream.put_tokens(0, [token_id], "abcde"[token_id - 1], columns(token_id))
    assert await chunks(stream, 3) == [([1, 2], "ab", [1, 2]), ([3, 4], "cd", [3, 4]), ([5], "e", [5])]


@pytest.mark.usefixtures("five_entries")
async def test_all_that_a_resumed_stream_missed_comes_in_pieces_with_the_text_last(stream: GenerationStream) -> None:
    stream.put_tokens(0, [1, 2, 3, 4, 5], "all", columns(1, 2, 3, 4, 5))
    stream.put_tokens(0, [], "!", columns())  # text that came by itself
    stream.put_tokens(0, [6], "", columns(6))
    assert await chunks(stream, 3) == [([1, 2], "", [1, 2]), ([3, 4], "", [3, 4]), ([5, 6], "all!", [5, 6])]


async def test_what_was_put_does_not_change_when_more_comes(stream: GenerationStream) -> None:
    known = columns(1)
    stream.put_tokens(0, [1], "", known.part(0))
    stream.put_tokens(0, [2], "", columns(2))
    assert known == columns(1)


async def test_what_another_control_plane_tells_goes_on_where_this_one_stopped() -> None:
    """Behind a handover: with log-probabilities of tokens, and of a prompt that was not told to its end here."""
    wanted = generation(num_logprobs=1, num_prompt_logprobs=1, max_tokens=9)
    stream = GenerationStream(wanted, lambda: None)
    live = LiveRequest.of(wanted, stream, Tokenizer.for_scripted(), 0.0)
    live.start(0, 0.0)
    await anext(stream)
    of_prompt = Logprobs(2, num_unknown=1)
    of_prompt.extend(columns(4))
    live.tell(Chunk(index=0, token_ids=[65], text="A", logprobs=columns(1)))
    live.tell(PromptLogprobs(columns=of_prompt))
    live.tell(PromptLogprobs(columns=of_prompt))  # said again by the one after that
    live.tell(Chunk(index=0, token_ids=[66], text="B", logprobs=columns(2)))
    chunk, told, *_ = [await anext(stream) for _ in range(2)]
    assert isinstance(chunk, Chunk)
    assert (chunk.token_ids, chunk.logprobs) == ([65, 66], columns(1, 2))
    assert told == PromptLogprobs(columns=of_prompt)
    assert live.samples[0].logprobs == columns(1, 2)
    assert not isinstance(live.samples[0].finished, SampleFinished)
    assert not stream._pending
