"""All doors on one loopback port, before groups of the scripted model that live in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2_grpc

from control_plane.doors import admin, health, inference, vllm_engine
from control_plane.doors.served_model import ServedModel
from control_plane.text.model_text import load_model_text
from maniple.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from service_chassis.server import bind, make_server
from support.fleet_harness import RunningFleet, running_fleet

SERVICES = (inference.SERVICE, vllm_engine.SERVICE, admin.SERVICE, health.SERVICE)


class RealDoors:
    """Clients of every door, and the groups behind them."""

    def __init__(self, running: RunningFleet, channel: grpc.aio.Channel, address: str) -> None:
        self.running = running
        self.address = address
        self.fleet = running.fleet
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def readiness(self, service: str = inference.SERVICE) -> str:
        """Return the name of a service's health."""
        answer = await self._health.Check(health_pb2.HealthCheckRequest(service=service))
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    def generate(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, *, timeout_s: float | None = None, **wanted: Any
    ) -> Any:
        """Begin a greedy generation that runs to ``max_tokens``."""
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **wanted.pop("sampling", {})}
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=sampling_pb2.SamplingParams(**sampling),
            **wanted,
        )
        return self.inference.Generate(request, timeout=timeout_s)


@asynccontextmanager
async def real_doors(*models: str | Sequence[str], **config: Any) -> AsyncIterator[RealDoors]:
    """Form a group for each model, or list of the models of its lives, and open all doors before them."""
    config = {"executor": "uni", "block_size": 4, "max_num_seqs": 8, "num_kv_blocks": 400, **config}
    async with running_fleet(*(models or ("scripted",)), **config) as running:
        fleet = running.fleet
        served = ServedModel(names=("scripted",), source="scripted", text=load_model_text("scripted"))
        server = make_server(4 << 20)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference.InferenceDoor(fleet, served), server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            vllm_engine.VllmEngineDoor(fleet, served, version="0"), server
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            admin.AdminDoor(fleet, served, version="0", drain=fleet.drain, uptime_s=lambda: 1.0), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthDoor(fleet, SERVICES), server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                yield RealDoors(running, channel, address)
            finally:
                await server.stop(0)
