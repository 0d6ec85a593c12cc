"""The client for asyncio programs. The same calls as ``Client``, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from maniple.v1 import admin_pb2, inference_pb2
from maniple_client.admin import AsyncAdmin
from maniple_client.channel import CHANNEL_OPTIONS, DEFAULT_ADDRESS
from maniple_client.client import _CALL_TIMEOUT_S
from maniple_client.errors import (
    ManipleError,
    PermissionDenied,
    Unauthenticated,
    from_rpc_error,
    from_stream_error,
    richer,
)
from maniple_client.events import Event, Transcript, event_of
from maniple_client.recovery import RESUME_FOR_S, Recovery
from maniple_client.requests import (
    Embedding,
    Messages,
    Options,
    Pooling,
    embed_request,
    generate_request,
    tokenize_request,
)
from maniple_client.resuming import left_s, open_call, response_of
from maniple_client.security import Tls, Token
from maniple_client.servers import Servers


class AsyncGenerationStream:
    """The events of one generation. Iterate it, or await ``text()``; leaving its ``async with`` block cancels.

    When the server is lost or replaced it resumes by itself at another one, or at the same one once that is back: the
    caller sees a pause, every token once.

    Attributes:
        transcript: what has come so far, per sample; complete once the iteration ended.
    """

    def __init__(
        self,
        servers: Servers[grpc.aio.Channel],
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        resume_for_s: float,
    ) -> None:
        self.transcript = Transcript()
        self._servers = servers
        self._request = request
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._recovery = Recovery(give_up_after_s=resume_for_s, num_addresses=len(servers))
        self._closed = False
        self._call = self._open()
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def request_id(self) -> str:
        """The id, once the first event came."""
        return self.transcript.started.request_id if self.transcript.started else ""

    async def text(self, index: int = 0) -> str:
        """Read to the end and return the text of one sample."""
        async for _ in self:
            pass
        return self.transcript.samples[index].text if index in self.transcript.samples else ""

    def close(self) -> None:
        """Cancel if it still runs: the server frees what it held within a step. Safe to call twice."""
        self._closed = True
        self._call.cancel()

    def _open(self) -> Any:
        """Begin the next call: Generate, or Resume once the request has started."""
        self._server = self._servers.present
        return open_call(self._server.inference, self._request, self.transcript, left_s(self._deadline))

    async def _read(self) -> AsyncIterator[Event]:
        while True:
            try:
                async for event in self._read_call():
                    yield event
                return
            except ManipleError as error:
                attempt = self._recovery.after(
                    error,
                    time.monotonic(),
                    has_started=self.transcript.started is not None,
                    has_output=bool(self.transcript.samples),
                    can_resume=self.transcript.can_resume and not self._closed,
                )
                if attempt is None:
                    raise
                await asyncio.sleep(attempt.delay_s)
                if self._closed:
                    raise
                if attempt.starts_over:  # where they know that nobody has it
                    self._request.request_id = self.request_id
                    self.transcript.start_over()
                else:
                    self._servers.move(attempt.address, self._server)
            self._call = self._open()

    async def _read_call(self) -> AsyncIterator[Event]:
        in_band: ManipleError | None = None
        try:
            async for message in self._call:
                response = response_of(message)
                if response.WhichOneof("event") == "error":
                    in_band = from_stream_error(response.error)
                elif (event := self.transcript.news_in(event_of(response))) is not None:
                    self._recovery.heard()
                    self.transcript.add(event)
                    yield event
        except grpc.RpcError as error:
            raise richer(in_band, from_rpc_error(error)) from error
        if in_band is not None:
            raise in_band


class AsyncClient:
    """A connection to a server, or to one of several that take over from each other, bound to its event loop.

    Example:
        >>> async with AsyncClient("127.0.0.1:50051") as client:
        ...     async for event in client.generate(prompt="Once upon a time", max_tokens=64):
        ...         ...
    """

    def __init__(
        self,
        address: str | Iterable[str] = DEFAULT_ADDRESS,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        channel: grpc.aio.Channel | None = None,
        resume_for_s: float = RESUME_FOR_S,
    ) -> None:
        """Connect lazily. Arguments as ``Client``."""

        def connect(target: str) -> grpc.aio.Channel:
            if tls is not None and not target.startswith("unix:"):
                options = [*CHANNEL_OPTIONS, *tls.options()]
                return grpc.aio.secure_channel(target, tls.credentials(), options=options)
            if credentials is not None:
                return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)

        self._resume_for_s = resume_for_s
        self._servers = Servers(
            "" if channel else address,
            (lambda _: channel) if channel else connect,
            tls=tls,
            token=token,
            is_plaintext=tls is None and credentials is None and channel is None,
        )

    @property
    def _inference(self) -> Any:
        stub: Any = self._servers.present.inference
        return stub

    @property
    def _admin(self) -> Any:
        stub: Any = self._servers.present.admin
        return stub

    @property
    def admin(self) -> AsyncAdmin:
        """What operators ask."""
        return AsyncAdmin(lambda: self._admin)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; what still streams is cancelled."""
        await asyncio.gather(*(channel.close() for channel in self._servers.channels()))

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerationStream:
        """Start a generation from text, token ids or a conversation. Arguments as ``Client.generate``."""
        request = generate_request(prompt, token_ids, messages, options)
        return AsyncGenerationStream(self._servers, request, timeout_s, self._resume_for_s)

    async def embed(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        pooling: Pooling = "last",
        normalize: bool | None = None,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Embedding:
        """Turn a prompt into a vector. As ``Client.embed``."""
        request = embed_request(prompt, token_ids, pooling, normalize, model, request_id)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        recovery = Recovery(give_up_after_s=self._resume_for_s, num_addresses=len(self._servers))
        while True:
            server = self._servers.present
            try:
                return Embedding.of(await self._unary(server.inference.Embed, request, left_s(deadline)))
            except ManipleError as error:
                attempt = recovery.after(error, time.monotonic(), has_started=False, may_repeat=not request_id)
                if attempt is None:
                    raise
                await asyncio.sleep(attempt.delay_s)
                self._servers.move(attempt.address, server)

    async def abort(self, request_id: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
        """End a request; its stream ends with reason abort. Return whether it was running."""
        answer = await self._unary(self._inference.Abort, inference_pb2.AbortRequest(request_id=request_id), timeout_s)
        return bool(answer.was_running)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> list[int]:
        """Return the token ids of a text or of a conversation."""
        request = tokenize_request(text, messages, model, add_special_tokens)
        return list((await self._unary(self._inference.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> str:
        """Return the text of token ids."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str((await self._unary(self._inference.Detokenize, request, timeout_s)).text)

    async def get_model(self, model: str = "", *, timeout_s: float = _CALL_TIMEOUT_S) -> inference_pb2.GetModelResponse:
        """Return what is served, and its limits."""
        answer: inference_pb2.GetModelResponse = await self._unary(
            self._inference.GetModel, inference_pb2.GetModelRequest(model=model), timeout_s
        )
        return answer

    async def status(self, *, timeout_s: float = _CALL_TIMEOUT_S) -> admin_pb2.GetStatusResponse:
        """Return what the server is doing."""
        answer: admin_pb2.GetStatusResponse = await self._unary(
            self._admin.GetStatus, admin_pb2.GetStatusRequest(), timeout_s
        )
        return answer

    async def wait_until_ready(self, *, timeout_s: float, poll_s: float = 0.1) -> admin_pb2.GetStatusResponse:
        """Wait until the server accepts requests. Raises the last error when ``timeout_s`` has passed.

        Needs the scope status, where callers have scopes, and the address where AdminService is served.
        """
        end = time.monotonic() + timeout_s
        while True:
            left_s = end - time.monotonic()
            try:
                status = await self.status(timeout_s=max(0.1, min(left_s, 2.0)))
                if status.ready:
                    return status
                last = ManipleError(grpc.StatusCode.UNAVAILABLE, status.not_ready_reason or "not ready")
            except (PermissionDenied, Unauthenticated):
                raise
            except ManipleError as error:
                last = error
            if left_s <= 0:
                raise last
            await asyncio.sleep(poll_s)

    @staticmethod
    async def _unary(method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
