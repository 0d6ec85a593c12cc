"""``vllm.grpc.engine.VllmEngine``: what the stock gateway speaks to engines. Ids in, ids out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from control_plane.doors import converters, vllm_converters
from control_plane.doors.calls import Context, call_facts, events
from control_plane.doors.embeddings import embed, to_embedding
from control_plane.doors.kv_event_stream import HEARTBEAT_S, KvEventStream
from control_plane.doors.limits import check_number
from control_plane.doors.load_messages import scheduler_load
from control_plane.doors.served_model import ServedModel
from control_plane.doors.tokenizer_archive import TokenizerArchive, pack
from control_plane.doors.vllm_responses import VllmResponses
from control_plane.fleet import Fleet
from service_chassis.auth import current_caller
from service_chassis.errors import NotBuilt, NotReady
from service_chassis.ids import RequestId

SERVICE = "vllm.grpc.engine.VllmEngine"
# Gateways choose how to speak to an engine by this name.
_SERVER_TYPE = "vllm-grpc"


class VllmEngineDoor(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # untyped stubs
    """Translate between the gateway and the engine. Decides nothing."""

    def __init__(
        self, fleet: Fleet, served: ServedModel, *, version: str, new_seed: Callable[[], int] = converters.draw_seed
    ) -> None:
        self._fleet = fleet
        self._served = served
        self._version = version
        self._new_seed = new_seed
        self._archive: TokenizerArchive | None = None
        self._received_at = 0.0  # the last request, in Unix time

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[vllm_engine_pb2.GenerateResponse, None]:
        """With ``stream`` chunks of new ids; always one ``complete`` per sample, with all of its ids."""
        fleet = self._fleet
        self._received_at = time.time()
        generation = await converters.to_generation(
            vllm_converters.to_maniple(request, max_prompt_tokens=fleet.limits.max_model_len - 1),
            call_facts(context, fleet),
            served=self._served,
            limits=fleet.limits,
            new_seed=self._new_seed,
        )
        if request.HasField("data_parallel_rank"):
            generation = replace(generation, group=request.data_parallel_rank)
        responses = VllmResponses(generation, streams=request.stream)
        async with aclosing(events(fleet, generation, context)) as all_events:
            async for event in all_events:
                for response in responses.take(event):
                    yield response

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: Context) -> vllm_engine_pb2.AbortResponse:
        for request_id in request.request_ids:
            self._fleet.abort(RequestId(request_id), by=current_caller())
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        return vllm_engine_pb2.HealthCheckResponse(
            healthy=self._fleet.ready, message=self._fleet.not_ready_reason or "ok"
        )

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        limits, text = self._fleet.limits, self._served.text
        # A gateway looks there for the tokenizer and asks GetTokenizer where it finds none. A name would send it to the
        # hub instead.
        path = str(text.directory or self._served.source)
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=path,
            is_generation=True,
            max_context_length=limits.max_model_len,
            vocab_size=limits.vocab_size,
            served_model_name=self._served.names[0],
            tokenizer_path=path,
            model_type=text.model_type,
            architectures=[text.architecture],
            eos_token_ids=text.eos_token_ids,
            pad_token_id=text.pad_token_id or 0,
            bos_token_id=text.bos_token_id or 0,
            max_req_input_len=limits.max_model_len - 1,
            default_sampling_params_json=text.defaults.to_json(),
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        status, limits = self._fleet.status(), self._fleet.limits
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=status.num_running + status.num_waiting,
            is_paused=self._fleet.is_paused,
            last_receive_timestamp=self._received_at,
            uptime_seconds=status.uptime_s,
            server_type=_SERVER_TYPE,
            data_parallel_size=len(status.groups),
            kv_cache_dtype="auto",
            block_size=limits.block_size,
            model_dtype=limits.dtype,
            max_num_seqs=limits.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        wanted = request.dp_rank if request.HasField("dp_rank") else None
        loads = [
            scheduler_load(rank, view.engine, view.limits)
            for rank, view in enumerate(self._fleet.status().groups)
            if view.engine and view.limits and wanted in (None, rank)
        ]
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=self._version, dp_rank_count=len(loads), loads=loads
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        """A zip of the tokenizer files in pieces; its hash comes with the last."""
        if self._archive is None:
            self._archive = await asyncio.to_thread(lambda: pack(self._served.text.tokenizer_files()))
        for piece, is_last in self._archive.chunks():
            yield common_pb2.GetTokenizerChunk(data=piece, sha256=self._archive.sha256 if is_last else "")

    async def Embed(self, request: vllm_engine_pb2.EmbedRequest, context: Context) -> vllm_engine_pb2.EmbedResponse:
        """The last token's hidden state, scaled to length 1, as vLLM embeds with a model that decodes."""
        fleet = self._fleet
        generation = await to_embedding(
            vllm_converters.to_embed(request), call_facts(context, fleet), served=self._served, limits=fleet.limits
        )
        answer = await embed(fleet, generation, context)
        return vllm_engine_pb2.EmbedResponse(
            embedding=answer.vector, prompt_tokens=answer.num_prompt_tokens, embedding_dim=len(answer.vector)
        )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Forget cached prefixes once nothing runs: as that contract has it, a running request is a refusal."""
        timeout_s = check_number("timeout_s", request.timeout_s, 0.0)
        if not await self._fleet.wait_idle(timeout_s):
            status = self._fleet.status()
            message = f"not flushed: {status.num_running + status.num_waiting} samples run or wait"
            return common_pb2.FlushCacheResponse(success=False, message=message)
        num_blocks = self._fleet.reset_prefix_cache()
        return common_pb2.FlushCacheResponse(success=True, message=f"{num_blocks} cached blocks were forgotten")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        _not_built("StartProfile")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        _not_built("StopProfile")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """All that is cached, then every change; while there is none, the load once a second."""
        with self._fleet.follow_kv_events() as follower:
            await context.send_initial_metadata(())  # a subscriber may wait for the answer to begin
            stream = KvEventStream(self._fleet, follower)
            if not (request.start_sequence_number and follower.continue_after(request.start_sequence_number)):
                for message in stream.beginning():
                    yield message
            while True:
                while messages := stream.news():
                    for message in messages:
                        yield message
                if not follower.is_any_alive:
                    raise NotReady(f"there is no prefix cache: {self._fleet.not_ready_reason}")
                if not await follower.wait(HEARTBEAT_S):
                    for message in stream.heartbeat():
                        yield message


def _not_built(method: str) -> NoReturn:
    raise NotBuilt(f"{SERVICE}/{method} is not built here")
