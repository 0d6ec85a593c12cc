"""The ways into a server that the load client knows: maniple.v1, VllmEngine over gRPC, and OpenAI's HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from frugal_client import FrugalClient
from load import Door
from maniple.v1 import inference_pb2
from maniple_client import AsyncClient, Chunk, ManipleError
from maniple_client.requests import Options, generate_request

_GENERATE = "/maniple.v1.InferenceService/Generate"
KINDS = ("maniple", "maniple-client", "vllm", "openai", "llama")


class ManipleDoor:
    """Ours. HTTP/2 by hand, as HTTP is in ``OpenAiDoor``: the server is measured, and not what a library costs."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: FrugalClient | None = None

    async def __aenter__(self) -> ManipleDoor:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    async def vocab_size(self) -> int:
        async with ManipleClientDoor(self._address) as door:
            size = await door.vocab_size()
        if self._connection is None:
            self._connection = await FrugalClient.connect_to(self._address)
        return size

    async def stream(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        assert self._connection is not None, "ask for vocab_size first: it says when the server answers"
        options = Options(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = generate_request(None, token_ids, None, options).SerializeToString()
        async for message in self._connection.messages(_GENERATE, request):
            event = inference_pb2.GenerateResponse.FromString(message)
            kind = event.WhichOneof("event")
            if kind == "chunk":
                yield len(event.chunk.token_ids)
            elif kind == "error":
                raise RuntimeError(event.error.message)


class ManipleClientDoor:
    """Ours, by the client that users of Python have."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> ManipleClientDoor:
        self._client = AsyncClient(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def vocab_size(self) -> int:
        try:
            await self._client.wait_until_ready(timeout_s=0.0)
            return (await self._client.get_model()).vocab_size
        except ManipleError as error:
            raise ConnectionError(str(error)) from error

    async def stream(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        async with self._client.generate(
            token_ids=token_ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        ) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    yield len(event.token_ids)


class VllmEngineDoor:
    """The contract that the stock gateway speaks; ours and vLLM's own gRPC server both have it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._number = 0

    async def __aenter__(self) -> VllmEngineDoor:
        from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

        self._messages: Any = vllm_engine_pb2
        self._channel = grpc.aio.insecure_channel(self._address)
        self._stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def vocab_size(self) -> int:
        try:
            await self._stub.HealthCheck(self._messages.HealthCheckRequest(), timeout=5)
            info = await self._stub.GetModelInfo(self._messages.GetModelInfoRequest(), timeout=5)
        except grpc.RpcError as error:
            raise ConnectionError(str(error)) from error
        return int(info.vocab_size)

    async def stream(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        self._number += 1
        request = self._messages.GenerateRequest(
            request_id=f"bench-{id(self):x}-{self._number}",
            tokenized=self._messages.TokenizedInput(input_ids=token_ids),
            sampling_params=self._messages.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            stream=True,
        )
        seen = 0
        async for response in self._stub.Generate(request):
            if response.HasField("chunk"):
                seen += len(response.chunk.token_ids)
                yield len(response.chunk.token_ids)
            elif response.complete.completion_tokens > seen:
                yield response.complete.completion_tokens - seen


class OpenAiDoor:
    """``/v1/completions`` with token ids and server-sent events.

    HTTP by hand: a client library would cost more CPU than the server's own work at these sizes.
    """

    def __init__(self, url: str, model: str, vocab_size: int, extra: Mapping[str, Any] = MappingProxyType({})) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self._extra = extra
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._vocab_size = vocab_size

    async def __aenter__(self) -> OpenAiDoor:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def vocab_size(self) -> int:
        """Return what was given: this API does not tell. The model's name it does."""
        body = b"".join([part async for part in self._call("GET", "/v1/models", None)])
        if not self._model:
            self._model = json.loads(body)["data"][0]["id"]
        return self._vocab_size

    async def stream(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        request = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            # Text may lag behind tokens; only the running count says when a token was made.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._extra,
        }
        seen = 0
        async for event in _server_sent_events(self._call("POST", "/v1/completions", request)):
            if "error" in event:
                raise RuntimeError(json.dumps(event["error"]))
            count = (event.get("usage") or {}).get("completion_tokens")
            if count is None:  # llama.cpp's running count
                count = (event.get("timings") or {}).get("predicted_n", seen + bool(event.get("choices")))
            if count > seen:
                yield count - seen
                seen = count

    async def _call(self, method: str, path: str, body: Any) -> AsyncIterator[bytes]:
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + content)
            status = int((await reader.readline()).split()[1])
            headers: dict[str, str] = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            parts = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _rest(reader)
            if status != 200:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                raise ConnectionError(f"HTTP {status}: {text[:300]}")
            async for part in parts:
                yield part
        finally:
            writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(65536):
        yield part


async def _server_sent_events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            text = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and text != b"[DONE]":
                yield json.loads(text)


def make_door(kind: str, url: str, model: str, vocab_size: int) -> Door:
    """Return the door of one of ``KINDS``; llama is OpenAI's with what llama.cpp adds."""
    if kind == "maniple":
        return ManipleDoor(url)
    if kind == "maniple-client":
        return ManipleClientDoor(url)
    if kind == "vllm":
        return VllmEngineDoor(url)
    extra = {"timings_per_token": True} if kind == "llama" else {}
    return OpenAiDoor(url, model, vocab_size, extra)
