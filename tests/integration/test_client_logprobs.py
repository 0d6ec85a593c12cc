"""Log-probabilities through the door of ``maniple.v1`` and the Python client, with a whole engine behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from control_plane.doors.inference import InferenceDoor
from control_plane.doors.served_model import ServedModel
from control_plane.fleet import Fleet
from control_plane.text.model_text import load_model_text
from maniple.v1 import inference_pb2_grpc, sampling_pb2
from maniple_client import AsyncClient, Chunk, Done, Finished, InvalidArgument, Logprobs
from service_chassis.server import bind, make_server
from support.engine_harness import running_engine, scripted
from support.logprobs import Position, expected, of_output, of_prompt
from support.scripted_reference import greedy
from worker_service.step_work import RAW_LOGITS

PROMPT = [5, 7, 11, 200]
MODEL = scripted(sampler="numpy")


@asynccontextmanager
async def client_of(directory: Path) -> AsyncIterator[AsyncClient]:
    fleet = Fleet()
    async with running_engine(MODEL, ids=fleet.ids) as engine:
        fleet.take(engine)
        server = make_server(1 << 20)
        served = ServedModel(names=("scripted",), source=MODEL, text=load_model_text(MODEL))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceDoor(fleet, served), server)
        address = bind(server, f"unix:{directory}/door")
        await server.start()
        async with AsyncClient(address) as client:
            yield client
        await server.stop(0)


def check(told: Logprobs, wanted: list[Position | None]) -> None:
    assert len(told) == len(wanted)
    for one, position in zip(told, wanted, strict=True):
        if one is None or position is None:
            assert one is None
            assert position is None
            continue
        token_id, value, rank, ids, values = position
        assert (one.token_id, one.rank, [top for top, _ in one.top]) == (token_id, rank, ids)
        assert [one.logprob, *(told_value for _, told_value in one.top)] == pytest.approx([value, *values], abs=2e-5)


async def test_chunks_say_it_of_their_tokens_and_done_of_the_prompt(tmp_path: Path) -> None:
    output = greedy(PROMPT, 9)
    async with client_of(tmp_path) as client:
        stream = client.generate(
            token_ids=PROMPT, temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1
        )
        told: list[object] = []
        done = None
        async for event in stream:
            match event:
                case Chunk():
                    assert len(event.logprobs) == len(event.token_ids)
                    told += event.logprobs
                case Finished():
                    assert event.logprobs == ()
                case Done():
                    done = event
        check(tuple(told), of_output(PROMPT, output, 2))  # type: ignore[arg-type]
        assert done is not None
        check(done.prompt_logprobs, of_prompt(PROMPT, 1))
        assert done.num_cached_tokens == 0


async def test_whole_output_says_it_of_all_its_tokens(tmp_path: Path) -> None:
    output = greedy(PROMPT, 9)
    async with client_of(tmp_path) as client:
        mode = sampling_pb2.LOGPROBS_MODE_RAW_LOGITS
        stream = client.generate(
            token_ids=PROMPT,
            temperature=0.0,
            max_tokens=9,
            ignore_eos=True,
            logprobs=0,
            logprobs_mode=mode,
            only_final=True,
        )
        (finished,) = [event async for event in stream if isinstance(event, Finished)]
    assert list(finished.token_ids) == output
    wanted = [expected(PROMPT + output[:place], token, 0, mode=RAW_LOGITS) for place, token in enumerate(output)]
    check(finished.logprobs, [*wanted])


async def test_masked_id_is_not_among_the_likeliest_of_what_was_processed(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        mode = sampling_pb2.LOGPROBS_MODE_PROCESSED_LOGPROBS
        stream = client.generate(
            token_ids=PROMPT, temperature=0.0, max_tokens=1, min_tokens=1, logprobs=20, logprobs_mode=mode
        )
        (chunk,) = [event async for event in stream if isinstance(event, Chunk)]
    assert 256 not in [token_id for token_id, _ in chunk.logprobs[0].top]  # type: ignore[union-attr]


async def test_more_than_a_message_holds_is_refused(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        with pytest.raises(InvalidArgument, match=r"logprobs=21: must be in \[0, 20\]"):
            await client.generate(token_ids=PROMPT, logprobs=21).text()
