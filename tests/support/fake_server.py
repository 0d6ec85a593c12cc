"""A gRPC server with the services of a Maniple server and nothing behind them: each test says what it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2

from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

Response = inference_pb2.GenerateResponse


def rich_status(code: grpc.StatusCode, message: str, *details: Any) -> tuple[tuple[str, bytes], ...]:
    """Return the trailers of a status with google.rpc details."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def answer(text: str, *, index: int = 0, started: bool = True, done: bool = True) -> Iterator[Response]:
    """Yield a whole good stream that says ``text``, a word a chunk with one made-up id each."""
    words = text.split(" ")
    if started:
        yield Response(started=Response.Started(request_id="r-1", resume_token="t", num_prompt_tokens=3))
    for number, word in enumerate(words):
        said = word if number == 0 else " " + word
        yield Response(chunk=Response.Chunk(index=index, token_ids=[number], text=said))
    reason = inference_pb2.FINISH_REASON_STOP
    yield Response(finished=Response.Finished(index=index, reason=reason, num_output_tokens=len(words)))
    if done:
        yield Response(
            done=Response.Done(
                num_prompt_tokens=3, num_output_tokens=len(words), time_to_first_token_s=0.125, duration_s=0.5
            )
        )


@dataclass
class FakeServer(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Answers by what its fields hold; keeps what it was asked."""

    generate: Callable[[inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[Response]] = (
        lambda request, context: answer("The sky is blue.")
    )
    resume: Callable[[inference_pb2.ResumeRequest, grpc.ServicerContext], Iterator[Response]] = (
        lambda request, context: iter(())
    )
    status: admin_pb2.GetStatusResponse = field(default_factory=lambda: admin_pb2.GetStatusResponse(ready=True))
    model: inference_pb2.GetModelResponse = field(
        default_factory=lambda: inference_pb2.GetModelResponse(
            served_names=["fake"], vocab_size=10, max_model_len=64, has_chat_template=True
        )
    )
    requests: list[Any] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def Generate(self, request: Any, context: Any) -> Iterator[Response]:
        self.requests.append(request)
        yield from self.generate(request, context)

    def Resume(self, request: Any, context: Any) -> Iterator[inference_pb2.ResumeResponse]:
        self.requests.append(request)
        for response in self.resume(request, context):
            yield inference_pb2.ResumeResponse(response=response)

    def Abort(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return inference_pb2.AbortResponse(was_running=request.request_id == "running")

    def Tokenize(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return inference_pb2.TokenizeResponse(token_ids=request.text.encode(), max_model_len=64)

    def Detokenize(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModel(self, request: Any, context: Any) -> Any:
        if request.model not in ("", *self.model.served_names):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model}")
        return self.model

    def GetStatus(self, request: Any, context: Any) -> Any:
        return self.status

    def PauseGeneration(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return admin_pb2.PauseGenerationResponse()

    def ResumeGeneration(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return admin_pb2.ResumeGenerationResponse()

    def IsPaused(self, request: Any, context: Any) -> Any:
        return admin_pb2.IsPausedResponse(is_paused=True)

    def Sleep(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        if request.level:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "not built yet")
        return admin_pb2.SleepResponse()

    def WakeUp(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return admin_pb2.WakeUpResponse()

    def IsSleeping(self, request: Any, context: Any) -> Any:
        return admin_pb2.IsSleepingResponse(is_sleeping=True, tags=["scheduling"])

    def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=5, num_blocks_in_use=2)

    def Drain(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        yield admin_pb2.DrainResponse(num_running=3, num_waiting=1)
        yield admin_pb2.DrainResponse(num_aborted=4)

    def wait_for_cancel(self, request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        """A ``generate`` that says two words and then nothing until the client goes."""
        context.add_callback(self.cancelled.set)
        yield from list(answer("Once upon", done=False))[:-1]
        self.cancelled.wait(20)


@contextmanager
def running(server: FakeServer | None = None) -> Iterator[FakeServer]:
    """Run ``server`` on a free port while the block lasts; its ``address`` says where."""
    server = server or FakeServer()
    shell = grpc.server(ThreadPoolExecutor(8))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(server, shell)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(server, shell)
    server.address = f"127.0.0.1:{shell.add_insecure_port('127.0.0.1:0')}"
    shell.start()
    try:
        yield server
    finally:
        server.cancelled.set()
        shell.stop(None).wait()
