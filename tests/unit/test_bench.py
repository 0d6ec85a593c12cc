"""The load client's arithmetic, and that it sends what it says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maniple.v1 import inference_pb2
from support.fake_server import FakeServer, Response, running

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([1.0], 99, 1.0), (list(range(1, 101)), 99, 99), (list(range(1, 101)), 90, 90)],
)
def test_percentile_is_the_nearest_rank(values: list[float], percent: float, expected: float) -> None:
    from report import percentile

    assert percentile(values, percent) == expected


def test_prompts_follow_from_the_seed_and_keep_to_their_lengths() -> None:
    from load import Length, make_prompts

    made = make_prompts(50, Length.read("3:7"), Length.read("5"), 800, seed=1, rate=2.0)
    assert made == make_prompts(50, Length.read("3:7"), Length.read("5"), 800, seed=1, rate=2.0)
    assert made != make_prompts(50, Length.read("3:7"), Length.read("5"), 800, seed=2, rate=2.0)
    assert {len(prompt.token_ids) for prompt in made} == {3, 4, 5, 6, 7}
    assert {prompt.output_len for prompt in made} == {5}
    assert all(100 <= one < 700 for prompt in made for one in prompt.token_ids)
    # Poisson with 2 a second: the mean wait of 50 lies within 4 standard errors of 0.5 s.
    assert abs(sum(prompt.wait_s for prompt in made) / 50 - 0.5) < 4 * 0.5 / 50**0.5


@pytest.mark.parametrize("text", ["0", "7:3", "x", ""])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    from load import Length

    with pytest.raises(ValueError, match=r"is no length|invalid literal"):
        Length.read(text)


_AS_VLLM = [
    {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}},
    {"choices": [{"text": ""}], "usage": {"completion_tokens": 3}},
    {"choices": [{"text": "bcd"}], "usage": {"completion_tokens": 4}},
    {"choices": [], "usage": {"completion_tokens": 4}},
]
# Its last event with a choice has no token, and only that one the usage.
_AS_LLAMA_CPP = [
    {"choices": [{"text": "a"}], "timings": {"predicted_n": 1}},
    {"choices": [{"text": "b"}], "timings": {"predicted_n": 3}},
    {"choices": [{"text": "c"}], "timings": {"predicted_n": 4}},
    {"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 4}},
]


@pytest.mark.parametrize("events", [_AS_VLLM, _AS_LLAMA_CPP], ids=["vllm", "llama.cpp"])
def test_openai_stream_counts_tokens_by_the_running_count(events: list[dict[str, Any]]) -> None:
    """Against a server of a few lines: chunked, two events in one chunk, an event over two chunks, text that lags."""
    from doors import OpenAiDoor

    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (body[:150], body[150:155], body[155:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> list[int]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        counts = [count async for count in OpenAiDoor(f"http://127.0.0.1:{port}", "m", 10).stream([1, 2], 4)]
        server.close()
        return counts

    assert asyncio.run(run()) == [1, 2, 1]


def _tokens(request: Any, context: object) -> Iterator[Response]:
    for number in range(request.sampling.max_tokens):
        yield Response(chunk=Response.Chunk(token_ids=[number]))
    yield Response(finished=Response.Finished(reason=inference_pb2.FINISH_REASON_LENGTH))


@pytest.mark.parametrize("rhythm", [["--concurrency", "3"], ["--rate", "200"]], ids=["closed", "open"])
def test_bench_reports_every_request_in_a_last_line_of_json(rhythm: list[str]) -> None:
    with running(FakeServer(generate=_tokens)) as server:
        server.model.vocab_size = 800
        command = [sys.executable, str(BENCH / "serve.py"), "--url", server.address, *rhythm]
        command += ["--num-requests", "7", "--input-len", "5:9", "--output-len", "6", "--warmup", "1"]
        command += ["--peer", server.address, "--peer-door", "maniple", "--runs", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # Warm-up: one request each. Then pairs in turns.
    ours, peer = "ours (maniple)", "peer (maniple)"
    assert [run["server"] for run in result["runs"]] == [ours, peer, peer, ours]
    assert all((run["num_requests"], run["num_failed"]) == (7, 0) for run in result["runs"])
    assert all(run["num_output_tokens"] == 42 for run in result["runs"])
    assert len(server.requests) == 2 + 4 * 7
    assert all(request.sampling.ignore_eos for request in server.requests)
    assert len(result["ratios"]) == 2


def test_bench_exits_1_when_a_request_gets_fewer_tokens_than_it_asked_for() -> None:
    def too_few(request: Any, context: object) -> Iterator[Response]:
        yield Response(chunk=Response.Chunk(token_ids=[1]))

    with running(FakeServer(generate=too_few)) as server:
        server.model.vocab_size = 800
        command = [sys.executable, str(BENCH / "serve.py"), "--url", server.address, "--num-requests", "2"]
        done = subprocess.run([*command, "--warmup", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["runs"][0]["errors"] == ["asked for 128 tokens, got 1"]


def test_masks_bench_reports_what_rows_cost_and_their_mates_notice(capsys: pytest.CaptureFixture[str]) -> None:
    from masks import main

    small = ["--rows", "1,3", "--constrained", "0,2", "--step-ms", "0", "--tokens", "5"]
    main(["--model", "scripted", "--executor", "uni", *small])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["us_per_row"].keys() == {"1", "3"}
    assert figures["steps_per_s"].keys() == {"0", "2"}
    assert figures["compile_ms"]["again"] < figures["compile_ms"]["first"]


def test_adoption_bench_reports_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    from adoption import PHASES, main

    small = ["--model", "scripted", "--rows", "3", "--input-len", "20", "--output-len", "90", "--runs", "1", "--cpu"]
    for options in ([], ["--stop", "###"], ["--no-text"]):
        result = main([*small, *options])
        assert (result["rows"], result["input_len"], result["output_len"]) == (3, 20, 90)
        assert set(result["milliseconds"]) == {*PHASES, "all"}
