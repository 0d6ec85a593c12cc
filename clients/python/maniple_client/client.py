"""The client for synchronous programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from maniple_client.admin import Admin
from maniple_client.channel import CHANNEL_OPTIONS, DEFAULT_ADDRESS
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

_CALL_TIMEOUT_S = 30.0
_Answer = TypeVar("_Answer")


class GenerationStream:
    """The events of one generation. Iterate it, or take ``text()``; leaving its ``with`` block cancels what still runs.

    When the server is lost or replaced it resumes by itself at another one, or at the same one once that is back: the
    caller sees a pause, every token once.

    Attributes:
        transcript: what has come so far, per sample; complete once the iteration ended.
    """

    def __init__(
        self,
        servers: Servers[grpc.Channel],
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        resume_for_s: float,
    ) -> None:
        self.transcript = Transcript()
        self._servers = servers
        self._request = request
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._recovery = Recovery(give_up_after_s=resume_for_s, num_addresses=len(servers))
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._call = self._open()
        self._events = self._read()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def request_id(self) -> str:
        """The id, once the first event came."""
        return self.transcript.started.request_id if self.transcript.started else ""

    def text(self, index: int = 0) -> str:
        """Read to the end and return the text of one sample."""
        for _ in self:
            pass
        return self.transcript.samples[index].text if index in self.transcript.samples else ""

    def close(self) -> None:
        """Cancel if it still runs: the server frees what it held within a step. Safe to call twice."""
        with self._lock:
            self._closed.set()
            self._call.cancel()

    def _open(self) -> Any:
        """Begin the next call: Generate, or Resume once the request has started."""
        self._server = self._servers.present
        return open_call(self._server.inference, self._request, self.transcript, left_s(self._deadline))

    def _read(self) -> Iterator[Event]:
        while True:
            try:
                yield from self._read_call()
                return
            except ManipleError as error:
                attempt = self._recovery.after(
                    error,
                    time.monotonic(),
                    has_started=self.transcript.started is not None,
                    has_output=bool(self.transcript.samples),
                    can_resume=self.transcript.can_resume and not self._closed.is_set(),
                )
                if attempt is None or self._closed.wait(attempt.delay_s):
                    raise
                if attempt.starts_over:  # where they know that nobody has it
                    self._request.request_id = self.request_id
                    self.transcript.start_over()
                else:
                    self._servers.move(attempt.address, self._server)
            with self._lock:
                if not self._closed.is_set():
                    self._call = self._open()

    def _read_call(self) -> Iterator[Event]:
        in_band: ManipleError | None = None
        try:
            for message in self._call:
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


class Client:
    """A connection to a server, or to one of several that take over from each other. Safe to use from several threads.

    Example:
        >>> with Client("127.0.0.1:50051") as client:
        ...     for event in client.generate(messages=[{"role": "user", "content": "Why is the sky blue?"}]):
        ...         ...
        ...     client.generate(prompt="Once upon a time", max_tokens=64, temperature=0.7).text()
    """

    def __init__(
        self,
        address: str | Iterable[str] = DEFAULT_ADDRESS,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        channel: grpc.Channel | None = None,
        resume_for_s: float = RESUME_FOR_S,
    ) -> None:
        """Connect lazily, in plaintext unless ``tls`` or ``credentials`` are given.

        Args:
            address: HOST:PORT or unix:PATH of a server; or of several, in order of preference.
            tls: files for TLS, which may be replaced at any time. Unix sockets are reached without.
            token: a bearer token that every call carries, or what returns it, such as ``token_in(path)``. It is sent
                in plaintext to this machine only.
            credentials: for TLS, instead of ``tls``.
            channel: used instead of a new connection to a single address.
            resume_for_s: how long a broken generation is looked for before its stream raises. 0: it raises at once.
        """

        def connect(target: str) -> grpc.Channel:
            if tls is not None and not target.startswith("unix:"):
                options = [*CHANNEL_OPTIONS, *tls.options()]
                return grpc.secure_channel(target, tls.credentials(), options=options)
            if credentials is not None:
                return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
            return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)

        self._resume_for_s = resume_for_s
        self._servers = Servers(
            "" if channel else address,
            (lambda _: channel) if channel else connect,
            tls=tls,
            token=token,
            is_plaintext=tls is None and credentials is None and channel is None,
        )

    @property
    def _inference(self) -> inference_pb2_grpc.InferenceServiceStub:
        stub: inference_pb2_grpc.InferenceServiceStub = self._servers.present.inference
        return stub

    @property
    def _admin(self) -> admin_pb2_grpc.AdminServiceStub:
        stub: admin_pb2_grpc.AdminServiceStub = self._servers.present.admin
        return stub

    @property
    def admin(self) -> Admin:
        """What operators ask."""
        return Admin(lambda: self._admin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; what still streams is cancelled."""
        for channel in self._servers.channels():
            channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> GenerationStream:
        """Start a generation from text, token ids or a conversation.

        Args:
            prompt: text to continue.
            token_ids: ids to continue, as they are.
            messages: a conversation, which the model's chat template turns into a prompt.
            timeout_s: the deadline; the server stops computing when it passes.
            options: how to sample, and how the server treats the request.
        """
        request = generate_request(prompt, token_ids, messages, options)
        return GenerationStream(self._servers, request, timeout_s, self._resume_for_s)

    def embed(
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
        """Turn a prompt into a vector. Sent again by itself where a server or its workers were lost on the way.

        Args:
            prompt: text.
            token_ids: ids, as they are.
            pooling: the hidden state of the last token, or the mean over all tokens.
            normalize: scale the vector to length 1. Default: the server's, which does.
            model: a served name.
            request_id: an id of your own. A request that has one is sent once.
            timeout_s: the deadline.
        """
        request = embed_request(prompt, token_ids, pooling, normalize, model, request_id)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        recovery = Recovery(give_up_after_s=self._resume_for_s, num_addresses=len(self._servers))
        while True:
            server = self._servers.present
            try:
                return Embedding.of(self._unary(server.inference.Embed, request, left_s(deadline)))
            except ManipleError as error:
                attempt = recovery.after(error, time.monotonic(), has_started=False, may_repeat=not request_id)
                if attempt is None:
                    raise
                time.sleep(attempt.delay_s)
                self._servers.move(attempt.address, server)

    def abort(self, request_id: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
        """End a request; its stream ends with reason abort. Return whether it was running."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        return self._unary(self._inference.Abort, request, timeout_s).was_running

    def tokenize(
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
        return list(self._unary(self._inference.Tokenize, request, timeout_s).token_ids)

    def detokenize(
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
        return self._unary(self._inference.Detokenize, request, timeout_s).text

    def get_model(self, model: str = "", *, timeout_s: float = _CALL_TIMEOUT_S) -> inference_pb2.GetModelResponse:
        """Return what is served, and its limits."""
        return self._unary(self._inference.GetModel, inference_pb2.GetModelRequest(model=model), timeout_s)

    def status(self, *, timeout_s: float = _CALL_TIMEOUT_S) -> admin_pb2.GetStatusResponse:
        """Return what the server is doing."""
        return self._unary(self._admin.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)

    def wait_until_ready(self, *, timeout_s: float, poll_s: float = 0.1) -> admin_pb2.GetStatusResponse:
        """Wait until the server accepts requests. Raises the last error when ``timeout_s`` has passed.

        Needs the scope status, where callers have scopes, and the address where AdminService is served.
        """
        end = time.monotonic() + timeout_s
        while True:
            left_s = end - time.monotonic()
            try:
                status = self.status(timeout_s=max(0.1, min(left_s, 2.0)))
                if status.ready:
                    return status
                last = ManipleError(grpc.StatusCode.UNAVAILABLE, status.not_ready_reason or "not ready")
            except (PermissionDenied, Unauthenticated):
                raise
            except ManipleError as error:
                last = error
            if left_s <= 0:
                raise last
            time.sleep(poll_s)

    @staticmethod
    def _unary(method: Callable[..., _Answer], request: Any, timeout_s: float | None) -> _Answer:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
