"""``inference.GRPCInferenceService``: KServe's open inference protocol (v2), with Triton's ``ModelStreamInfer``.

On the stubs of the package ``tritonclient``, which is an extra: only who has found it imports this module. The model is
decoupled, as Triton calls it: one request may have many responses, and the last says that it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from control_plane.doors import converters
from control_plane.doors.calls import Context, admit, call_facts, events, read_events
from control_plane.doors.kserve_extra import SERVICE
from control_plane.doors.multiplex import Multiplexer
from control_plane.doors.open_inference_converters import (
    INPUTS,
    OUTPUTS,
    VERSION,
    Answers,
    Wanted,
    check_version,
    empty_response,
    to_wanted,
)
from control_plane.doors.served_model import ServedModel
from control_plane.doors.tensors import BOOL, BYTES, FP32, UINT32, InferRequest, InferResponse
from control_plane.generation import Chunk, Event, SampleFinished, Started
from service_chassis.errors import NotBuilt, NotReady, QueueFull
from service_chassis.interceptors import as_maniple_error

if TYPE_CHECKING:
    from control_plane.fleet import Fleet

PLATFORM = "maniple"
# Requests of one stream at a time. Each of them holds memory here, before the engine may say that its queue is full.
MAX_OPEN_REQUESTS = 1024
# Larger requests are read in a thread, beside the event loop.
_INLINE_BYTES = 1 << 16
_EXTENSIONS = ("model_configuration", "model_repository", "parameters", "statistics")
_TYPES = {BYTES: "TYPE_STRING", BOOL: "TYPE_BOOL", UINT32: "TYPE_UINT32", FP32: "TYPE_FP32"}
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += int(max(seconds, 0.0) * 1e9)

    def to_message(self) -> Any:
        return service_pb2.StatisticDuration(count=self.count, ns=self.ns)


class _Statistics:
    """What became of the requests of this door, in the terms of ``ModelStatistics``."""

    def __init__(self) -> None:
        self.last_at_ms = 0
        self.success, self.fail, self.queue, self.compute = _Duration(), _Duration(), _Duration(), _Duration()

    def note(self, arrived_at: float, started_at: float | None, now: float, *, is_good: bool) -> None:
        self.last_at_ms = time.time_ns() // 1_000_000
        (self.success if is_good else self.fail).add(now - arrived_at)
        if started_at is not None:
            self.queue.add(started_at - arrived_at)
            self.compute.add(now - started_at)


class OpenInferenceDoor(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # untyped stubs
    """Translate between clients and the engine. Decides nothing."""

    def __init__(
        self, fleet: Fleet, served: ServedModel, *, version: str, new_seed: Callable[[], int] = converters.draw_seed
    ) -> None:
        self._fleet = fleet
        self._served = served
        self._version = version
        self._new_seed = new_seed
        self._statistics = _Statistics()

    # Inference

    async def ModelInfer(self, request: InferRequest, context: Context) -> InferResponse:
        """One request, one response."""
        wanted = await self._read(request, may_stream=False)
        async with aclosing(self._responses(wanted, context, is_alone=True)) as responses:
            return await anext(responses)  # without stream there is one

    async def ModelStreamInfer(
        self, requests: AsyncIterator[InferRequest], context: Context
    ) -> AsyncGenerator[Any, None]:
        """Any number of requests side by side. One that fails says so in its own last response; the others go on."""

        async def answer(request: InferRequest) -> AsyncGenerator[Any, None]:
            try:
                if multiplexer.num_open > MAX_OPEN_REQUESTS:
                    rule = f"{MAX_OPEN_REQUESTS} requests of this stream are being answered already"
                    raise QueueFull(rule, retry_after_s=1.0)
                wanted = await self._read(request, may_stream=True)
                async with aclosing(self._responses(wanted, context, is_alone=False)) as responses:
                    async for response in responses:
                        yield service_pb2.ModelStreamInferResponse(infer_response=response)
            except Exception as caught:
                error = as_maniple_error(caught, method=f"/{SERVICE}/ModelStreamInfer", request_id=request.id[:128])
                name = request.model_name or self._served.names[0]
                last = empty_response(name, request.id, service_pb2.ModelInferResponse, is_last=True)
                message = f"{_CODES[error.code]}: {error.message}"
                yield service_pb2.ModelStreamInferResponse(error_message=message, infer_response=last)

        multiplexer: Multiplexer[InferRequest, Any] = Multiplexer(answer, size_of=lambda request: request.ByteSize())
        async with aclosing(multiplexer.answers(requests, closing=self._fleet.closed)) as answers:
            async for one in answers:
                yield one
        if multiplexer.was_closed:  # nothing is asked on it now, and the server is not kept up by what might be
            raise NotReady(f"not accepting requests: {self._fleet.not_ready_reason}")

    async def _read(self, request: InferRequest, *, may_stream: bool) -> Wanted:
        def read() -> Wanted:
            return to_wanted(request, default_model=self._served.names[0], may_stream=may_stream)

        # Its JSON may hold hundreds of thousands of numbers, which nobody else shall wait for.
        return read() if request.ByteSize() <= _INLINE_BYTES else await asyncio.to_thread(read)

    async def _responses(
        self, wanted: Wanted, context: Context, *, is_alone: bool
    ) -> AsyncGenerator[InferResponse, None]:
        """Generate; yield responses, the last of which says so. ``is_alone``: it is the only request of its call."""
        fleet, arrived_at = self._fleet, self._fleet.now()
        call = call_facts(context, fleet)
        if wanted.timeout_s is not None:
            deadline = arrived_at + wanted.timeout_s
            call = replace(call, deadline=deadline if call.deadline is None else min(deadline, call.deadline))
        answers: Answers | None = None
        started_at: float | None = None
        try:
            generation = await converters.to_generation(
                wanted.generate, call, served=self._served, limits=fleet.limits, new_seed=self._new_seed
            )
            tokenizer = self._served.text.tokenizer
            answers = Answers(
                wanted,
                service_pb2.ModelInferResponse,
                generation.sampling.n,
                lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False),
            )
            if is_alone:
                all_events: AsyncGenerator[Event, None] = events(fleet, generation, context)
            else:
                all_events = read_events(await admit(fleet, generation))
            async with aclosing(all_events):
                async for event in all_events:
                    if isinstance(event, Started):
                        started_at = fleet.now()
                        answers.start(event.num_prompt_tokens)
                    elif isinstance(event, Chunk | SampleFinished):
                        answers.add(event)
                        if answers.has_ended or (wanted.streams and isinstance(event, Chunk)):
                            yield answers.response()
        finally:
            is_good = answers is not None and answers.has_ended
            self._statistics.note(arrived_at, started_at, fleet.now(), is_good=is_good)

    # What there is, and how it does

    async def ServerLive(self, request: Any, context: Context) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Context) -> Any:
        return service_pb2.ServerReadyResponse(ready=self._fleet.is_serving)

    async def ModelReady(self, request: Any, context: Context) -> Any:
        is_known = request.name in self._served.names and request.version in ("", VERSION)
        return service_pb2.ModelReadyResponse(ready=is_known and self._fleet.is_serving)

    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        return service_pb2.ServerMetadataResponse(name=PLATFORM, version=self._version, extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        name = self._named(request)
        answer = service_pb2.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
        for one, datatype in INPUTS.items():
            answer.inputs.add(name=one, datatype=datatype, shape=[1])
        for one, datatype in OUTPUTS.items():
            answer.outputs.add(name=one, datatype=datatype, shape=[-1])
        return answer

    async def ModelConfig(self, request: Any, context: Context) -> Any:
        config = model_config_pb2.ModelConfig(name=self._named(request), platform=PLATFORM, backend=PLATFORM)
        for name, datatype in INPUTS.items():
            optional = name != "text_input"
            config.input.add(name=name, data_type=_TYPES[datatype], dims=[1], optional=optional)
        for name, datatype in OUTPUTS.items():
            config.output.add(name=name, data_type=_TYPES[datatype], dims=[-1])
        config.model_transaction_policy.decoupled = True
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        name, told = self._named(request), self._statistics
        answer = service_pb2.ModelStatisticsResponse()
        answer.model_stats.add(
            name=name,
            version=VERSION,
            last_inference=told.last_at_ms,
            inference_count=told.success.count,
            execution_count=told.success.count,
            inference_stats=service_pb2.InferStatistics(
                success=told.success.to_message(),
                fail=told.fail.to_message(),
                queue=told.queue.to_message(),
                compute_infer=told.compute.to_message(),
            ),
        )
        return answer

    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        answer = service_pb2.RepositoryIndexResponse()
        is_ready = self._fleet.is_serving
        if is_ready or not request.ready:
            state = "READY" if is_ready else "UNAVAILABLE"
            for name in self._served.names:
                answer.models.add(name=name, version=VERSION, state=state, reason=self._fleet.not_ready_reason)
        return answer

    def _named(self, request: Any) -> str:
        """Return the name a request uses for the model. Raises ``UnknownModel``."""
        self._served.check_name(request.name)
        check_version(request.version)
        return request.name or self._served.names[0]

    # What belongs to a server that keeps many models, or shares memory with its clients

    async def RepositoryModelLoad(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt("this server serves the one model that it was started with: there is nothing to load")

    async def RepositoryModelUnload(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt("this server serves the one model that it was started with: stop it to unload that")

    async def SystemSharedMemoryStatus(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt(_NO_SHARED_MEMORY)

    async def SystemSharedMemoryRegister(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt(_NO_SHARED_MEMORY)

    async def SystemSharedMemoryUnregister(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt(_NO_SHARED_MEMORY)

    async def CudaSharedMemoryStatus(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt(_NO_SHARED_MEMORY)

    async def CudaSharedMemoryRegister(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt(_NO_SHARED_MEMORY)

    async def CudaSharedMemoryUnregister(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt(_NO_SHARED_MEMORY)

    async def TraceSetting(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt("what is traced is said when the server starts, and cannot be changed here")

    async def LogSettings(self, request: Any, context: Context) -> NoReturn:
        raise NotBuilt("what is logged is said when the server starts: see --log-level and --log-format")


_NO_SHARED_MEMORY = "this server shares no memory with clients: send tensors in the request"
