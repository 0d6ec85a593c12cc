"""``Embed`` of both services and of the client, over a real socket before a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2

from control_plane.generation import PoolingChoice
from maniple.v1 import inference_pb2
from maniple.v1.inference_pb2 import EmbedRequest, TokenIds
from maniple_client import AsyncClient, Client, InvalidArgument
from service_chassis.errors import GroupLost, QueueFull
from support.fake_engine import Doors, open_doors
from support.waiting import until

VECTOR = [0.5, -0.25, 0.125]


async def embed(doors: Doors, **fields: Any) -> inference_pb2.EmbedResponse:
    return await doors.inference.Embed(EmbedRequest(**{"text": "hello", **fields}), timeout=10)


async def test_embed_returns_the_vector_and_counts_the_prompt() -> None:
    async with open_doors() as doors:
        answer = await embed(doors)
        assert (list(answer.embedding), answer.num_prompt_tokens) == (VECTOR, 5)


@pytest.mark.parametrize(
    ("fields", "choice", "reads_cache"),
    [
        ({}, PoolingChoice(is_mean=False, normalize=True), True),
        ({"pooling": EmbedRequest.POOLING_LAST, "normalize": False}, PoolingChoice(normalize=False), True),
        ({"pooling": EmbedRequest.POOLING_MEAN}, PoolingChoice(is_mean=True), False),
    ],
    ids=["unset", "last", "mean"],
)
async def test_embed_passes_on_how_to_pool(fields: dict[str, Any], choice: PoolingChoice, reads_cache: bool) -> None:
    async with open_doors() as doors:
        await embed(doors, request_id="r", token_ids=TokenIds(ids=[1, 2]), **fields)
        (seen,) = doors.engine.seen
    assert (seen.request_id, seen.prompt_token_ids, seen.pooling) == ("r", (1, 2), choice)
    assert seen.skip_reading_prefix_cache is not reads_cache


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"text": ""}, "text=''"),
        ({"text": "x" * 65}, "prompt='65 tokens'"),
        ({"token_ids": TokenIds(ids=[260])}, "token_ids=260"),
        ({"token_ids": TokenIds()}, "token_ids=[]"),
        ({"pooling": 9}, "pooling=9: must be POOLING_LAST or POOLING_MEAN"),
        ({"request_id": "a b"}, "request_id='a b'"),
    ],
)
async def test_embed_refuses_what_generate_would_refuse(fields: dict[str, Any], sentence: str) -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(doors, **fields)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in str(caught.value.details())
        with pytest.raises(grpc.aio.AioRpcError, match="one of text and token_ids must be set"):
            await doors.inference.Embed(EmbedRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(doors, model="other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert doors.engine.seen == []


async def test_embed_ends_with_the_status_of_its_request() -> None:
    async with open_doors() as doors:
        doors.engine.refusal = QueueFull("too many wait", retry_after_s=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(doors)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        doors.engine.refusal, doors.engine.error = None, GroupLost("rank 1 is gone")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(doors)
        assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_embed_is_given_up_when_its_client_goes_and_says_so_when_it_is_aborted() -> None:
    async with open_doors() as doors:
        doors.engine.gate.clear()
        call = doors.inference.Embed(EmbedRequest(request_id="gone", text="hello"))
        await until(lambda: doors.engine.seen, "it was admitted")
        call.cancel()
        await until(lambda: doors.engine.cancelled == ["gone"], "its blocks are free")
        call = doors.inference.Embed(EmbedRequest(request_id="ended", text="hello"))
        await until(lambda: len(doors.engine.seen) == 2, "it was admitted")
        await doors.inference.Abort(inference_pb2.AbortRequest(request_id="ended"))
        with pytest.raises(grpc.aio.AioRpcError, match="aborted before its vector was complete") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_the_gateways_contract_embeds_ids_as_vllm_does() -> None:
    async with open_doors() as doors:
        wanted = vllm_engine_pb2.EmbedRequest(
            request_id="r", tokenized=vllm_engine_pb2.TokenizedInput(original_text="hi", input_ids=b"hi")
        )
        answer = await doors.vllm.Embed(wanted, timeout=10)
        assert (list(answer.embedding), answer.prompt_tokens, answer.embedding_dim) == (VECTOR, 2, 3)
        assert doors.engine.seen[0].pooling == PoolingChoice(is_mean=False, normalize=True)
        with pytest.raises(grpc.aio.AioRpcError, match="one of text and token_ids must be set"):
            await doors.vllm.Embed(vllm_engine_pb2.EmbedRequest(request_id="r"))


async def test_clients_embed() -> None:
    async with open_doors() as doors:
        async with AsyncClient(doors.address) as client:
            got = await client.embed("hello", pooling="mean", normalize=False)
            assert (got.vector, got.num_prompt_tokens) == (tuple(VECTOR), 5)
            with pytest.raises(InvalidArgument, match="prompt='65 tokens'"):
                await client.embed(token_ids=[1] * 65)

        def in_a_thread() -> None:
            with Client(doors.address) as client:
                assert client.embed(token_ids=[1, 2], request_id="sync", timeout_s=10).vector == tuple(VECTOR)
                with pytest.raises(TypeError, match="exactly one of"):
                    client.embed("a", token_ids=[1])
                with pytest.raises(ValueError, match="pooling"):
                    client.embed("a", pooling="max")  # type: ignore[arg-type]

        await asyncio.to_thread(in_a_thread)
        first, *_, last = doors.engine.seen
    assert first.pooling == PoolingChoice(is_mean=True, normalize=False)
    assert (last.request_id, last.prompt_token_ids) == ("sync", (1, 2))
