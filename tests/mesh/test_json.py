"""HTTP with JSON through docs/proxies/envoy.yaml: what curl and programs without gRPC hear."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from support.envoy import envoys, recommended
from support.mesh_calls import FLAGS, LONG, PROMPT, is_idle
from support.scripted_reference import greedy
from support.serve_process import Caller, ServeProcess, serving

SAMPLING = {"temperature": 0, "ignore_eos": True}
pytestmark = pytest.mark.usefixtures("page")


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serving(*FLAGS) as one:
        assert one.address
        yield one


@asynccontextmanager
async def http(directory: Path, server: ServeProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        asyncio.timeout(60),
        envoys(directory, recommended(server.address)) as [envoy],
        httpx.AsyncClient(base_url=f"http://{envoy.address()}", timeout=30) as one,
    ):
        yield one


def asked(max_tokens: int) -> dict[str, object]:
    return {"token_ids": {"ids": PROMPT}, "sampling": {**SAMPLING, "max_tokens": max_tokens}}


async def test_calls_with_one_answer_are_json(server: ServeProcess, tmp_path: Path) -> None:
    async with http(tmp_path, server) as one:
        model = (await one.get("/maniple/v1/model")).json()
        assert model["served_names"]
        assert model["vocab_size"] == 260
        answer = await one.post("/maniple/v1/tokenize", json={"text": "hi"})
        assert answer.json()["token_ids"] == list(b"hi")
        answer = await one.post("/maniple/v1/detokenize", json={"token_ids": list(b"hi")})
        assert answer.json() == {"text": "hi"}
        answer = await one.post("/maniple/v1/abort", json={"request_id": "nobody"})
        assert answer.json() == {}


async def test_generation_is_a_line_of_json_an_event(server: ServeProcess, tmp_path: Path) -> None:
    async with http(tmp_path, server) as one, one.stream("POST", "/maniple/v1/generate", json=asked(20)) as answer:
        assert answer.status_code == 200
        events = [json.loads(line) async for line in answer.aiter_lines()]
    assert "started" in events[0]
    assert [token for event in events for token in event.get("chunk", {}).get("token_ids", ())] == greedy(PROMPT, 20)
    assert events[-2]["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert events[-1]["done"]["num_output_tokens"] == 20


async def test_client_that_goes_away_frees_what_its_request_held(server: ServeProcess, tmp_path: Path) -> None:
    async with http(tmp_path, server) as one:
        async with one.stream("POST", "/maniple/v1/generate", json=asked(LONG)) as answer:
            assert "started" in await anext(answer.aiter_lines())
        await is_idle(server)


async def test_refusal_is_a_status_with_its_details(server: ServeProcess, tmp_path: Path) -> None:
    async with http(tmp_path, server) as one:
        answer = await one.post("/maniple/v1/generate", json={"text": "hi", "sampling": {"top_p": 3}})
        assert answer.status_code == 400
        [told] = [answer.json()] if isinstance(answer.json(), dict) else answer.json()
        assert told["code"] == 3
        assert "top_p" in told["message"]
        kinds = {detail["@type"].rpartition("/")[2]: detail for detail in told["details"]}
        assert kinds["google.rpc.ErrorInfo"]["domain"] == "maniple.dev"
        assert kinds["google.rpc.BadRequest"]["field_violations"][0]["field"] == "top_p"
        answer = await one.post("/maniple/v1/generate", json={"sampling": {"no_such_field": 3}})
        assert answer.status_code == 400
        assert (await one.post("/maniple.v1.AdminService/Drain")).status_code == 403


async def test_error_after_the_first_token_is_the_last_line(tmp_path: Path) -> None:
    """The status of the answer is long gone by then, and the proxy loses the trailers."""
    with serving(*FLAGS, "--executor", "mp") as server:
        async with http(tmp_path, server) as one, Caller(server) as caller:
            pid = (await caller.status()).groups[0].ranks[0].pid
            events = []
            async with one.stream("POST", "/maniple/v1/generate", json=asked(LONG)) as answer:
                async for line in answer.aiter_lines():
                    events.append(json.loads(line))
                    if "chunk" in events[-1] and len(events) == 4:
                        os.kill(pid, signal.SIGKILL)
            assert answer.status_code == 200
            assert "rank 0" in events[-1]["error"]["message"]
            assert events[-1]["error"]["reason"] == "ERROR_REASON_GROUP_LOST"
