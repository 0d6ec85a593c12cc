"""An engine without scheduler and workers: every request gets the tokens that a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import grpc
from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2_grpc
from tritonclient.grpc import service_pb2_grpc

from control_plane.doors.admin import AdminDoor
from control_plane.doors.health import HealthDoor
from control_plane.doors.inference import SERVICE as INFERENCE
from control_plane.doors.inference import InferenceDoor
from control_plane.doors.open_inference import OpenInferenceDoor
from control_plane.doors.served_model import ServedModel
from control_plane.doors.vllm_engine import SERVICE as VLLM_ENGINE
from control_plane.doors.vllm_engine import VllmEngineDoor
from control_plane.engine import Engine
from control_plane.engine_status import EngineLimits, EngineStatus
from control_plane.fleet import Fleet
from control_plane.generation import FinishReason, Generation
from control_plane.generation_stream import GenerationStream
from control_plane.live_request import LiveRequest
from control_plane.text.model_text import load_model_text
from control_plane.text.tokenizer import Tokenizer
from maniple.v1 import admin_pb2_grpc, inference_pb2_grpc
from service_chassis.errors import Cancelled, ManipleError, NotReady
from service_chassis.ids import RequestId
from service_chassis.server import bind, make_server
from support.waiting import until

SCRIPTED_LIMITS = EngineLimits(
    max_model_len=64,
    vocab_size=260,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=4,
    num_blocks=101,
    max_num_waiting=16,
    dtype="float32",
)


class FakeEngine:
    """Says ``output`` to every request, one token a chunk, then ends it as the real engine would.

    ``gate`` closed: requests are admitted and never start. ``error``: they fail with it, after the first token if
    ``error_after`` is 1, before they start if it is 0.
    """

    def __init__(self, tokenizer: Tokenizer, limits: EngineLimits = SCRIPTED_LIMITS) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.output: Sequence[int] = b"ok"
        self.vector: Sequence[float] = (0.5, -0.25, 0.125)  # of every request that pools
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: ManipleError | None = None
        self.error: BaseException | None = None
        self.error_after = 0
        self.ready = True
        self.not_ready_reason = ""
        self.is_still = True
        self.dormancy = SimpleNamespace(asleep=frozenset())
        self.seen: list[Generation] = []
        self.cancelled: list[str] = []
        self.now = time.monotonic
        self._live: dict[RequestId, LiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[bool], None]] = []

    def on_readiness(self, callback: Callable[[bool], None]) -> None:
        self._listeners.append(callback)
        callback(self.ready)

    def set_ready(self, ready: bool, reason: str = "") -> None:
        self.ready, self.not_ready_reason = ready, reason
        for callback in self._listeners:
            callback(ready)

    @property
    def admits(self) -> bool:
        return self.ready

    @property
    def is_at_rest(self) -> bool:
        return False

    async def generate(self, generation: Generation) -> GenerationStream:
        if not self.ready:
            raise NotReady(self.not_ready_reason)
        if self.refusal is not None:
            raise self.refusal
        self.seen.append(generation)
        stream = GenerationStream(generation, lambda: self._cancel(generation.request_id))
        live = LiveRequest.of(generation, stream, self.tokenizer, self.now())
        self._live[generation.request_id] = live
        task = asyncio.create_task(self._play(live))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def client_of(self, request_id: RequestId) -> str | None:
        live = self._live.get(request_id)
        return None if live is None else live.generation.client_identity

    def abort(self, request_id: RequestId) -> bool:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.abort()
            live.close(self.now())
        return live is not None

    def status(self) -> EngineStatus:
        return EngineStatus(
            model="fake",
            uptime_s=1.0,
            ready=self.ready,
            not_ready_reason=self.not_ready_reason,
            epoch=1,
            step=7,
            ranks=(),
            num_running=len(self._live),
            num_waiting=2,
            num_free_blocks=60,
            num_cached_blocks=15,
            num_preemptions=3,
            num_waiting_tokens=70,
            prompt_tokens_per_s=1.5,
            output_tokens_per_s=2.5,
            steps_per_s=3.5,
            prefix_cache_queries=40,
            prefix_cache_hits=10,
            num_finished=len(self.seen) - len(self._live),
        )

    def reset_prefix_cache(self) -> int:
        return 15

    @property
    def is_idle(self) -> bool:
        return not self._live

    async def wait_idle(self) -> None:
        await until(lambda: not self._live, "the end of all requests")

    def _cancel(self, request_id: RequestId) -> None:
        if (live := self._live.pop(request_id, None)) is not None:
            self.cancelled.append(request_id)
            live.fail(Cancelled("the client went away"))

    async def _play(self, live: LiveRequest) -> None:
        await self.gate.wait()
        request_id, sampling = live.generation.request_id, live.generation.sampling
        if self.error is not None and self.error_after == 0:
            return self._fail(live)
        live.start(0, self.now())
        if live.generation.pooling is not None and live.stream is not None:
            live.stream.put_vector(self.vector)
            live.push(0, (), FinishReason.STOP, None, self.now())
        for position, token_id in enumerate(self.output):
            await asyncio.sleep(0)
            if live.is_over:
                break
            if request_id not in self._live:
                return None
            finish = None
            if position + 1 > sampling.min_tokens and token_id in sampling.eos_ids | sampling.stop_token_ids:
                finish = FinishReason.STOP
            elif position + 1 == sampling.max_tokens:
                finish = FinishReason.LENGTH
            for index in range(sampling.n):
                live.push(index, [token_id], finish, token_id if finish is FinishReason.STOP else None, self.now())
            if live.is_over:
                break
            if self.error is not None:
                return self._fail(live)
        if not live.is_over:
            await asyncio.Event().wait()  # the model thinks on until somebody ends it
        del self._live[request_id]
        live.close(self.now())
        return None

    def _fail(self, live: LiveRequest) -> None:
        del self._live[live.generation.request_id]
        live.fail(cast(ManipleError, self.error))


class Doors:
    """All doors on one loopback port, before a fake engine."""

    def __init__(
        self, engine: FakeEngine, fleet: Fleet, channel: grpc.aio.Channel, address: str, health_door: HealthDoor
    ) -> None:
        self.engine = engine
        self.health_door = health_door
        self.fleet = fleet
        self.channel = channel
        self.address = address
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.drained: list[float | None] = []


@asynccontextmanager
async def open_doors(
    model: str = "scripted",
    *,
    limits: EngineLimits = SCRIPTED_LIMITS,
    max_message_bytes: int = 4 << 20,
    silent_within_s: float = 10.0,
) -> AsyncIterator[Doors]:
    """Serve ``model``'s text side and a fake engine; yields clients of every door."""
    text = load_model_text(model)
    served = ServedModel(names=("fake", "alias"), source=model, text=text)
    engine = FakeEngine(text.tokenizer, limits)
    fleet = Fleet()
    fleet.take(cast(Engine, engine))
    server = make_server(max_message_bytes)
    inference = InferenceDoor(fleet, served, silent_within_s=silent_within_s)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineDoor(fleet, served, version="0"), server)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(OpenInferenceDoor(fleet, served, version="0"), server)
    health_door = HealthDoor(fleet, [INFERENCE, VLLM_ENGINE], repeat_s=0.2)
    health_pb2_grpc.add_HealthServicer_to_server(health_door, server)
    drained: list[float | None] = []

    async def drain(deadline_s: float | None) -> int:
        drained.append(deadline_s)
        engine.set_ready(False, "draining")
        return 2

    admin = AdminDoor(fleet, served, version="1.2.3", drain=drain, uptime_s=lambda: 5.0)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        doors = Doors(engine, fleet, channel, address, health_door)
        doors.drained = drained
        try:
            yield doors
        finally:
            await server.stop(0)
