"""Streams with nothing to say outlive the idle timeouts of proxies, since they say that."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc

from maniple.v1 import admin_pb2
from support.envoy import Cluster, Door, envoys
from support.mesh_calls import FLAGS, PROMPT, request_of, rest, stub_of, tokens_of
from support.nginx import nginx_before
from support.scripted_reference import greedy
from support.serve_process import Caller, serving

IDLE_S = 12.0  # a little longer than the server lets streams be silent


async def test_queued_paused_and_final_only_streams_outlive_idle_timeouts(tmp_path: Path) -> None:
    """One row: one request computes and is paused, the other ones wait for it. Each is asked for through each proxy."""
    with serving(*FLAGS, "--max-num-seqs", "1") as server:
        door = Door(route_timeout_s=0, stream_idle_timeout_s=IDLE_S)
        nginx = nginx_before(tmp_path / "nginx", [server.address], changes={"grpc_read_timeout": f"{IDLE_S:.0f}s"})
        async with asyncio.timeout(90), envoys(tmp_path, (door, Cluster(addresses=[server.address]))) as [envoy]:
            with nginx as nginx_address:
                channels = [grpc.aio.insecure_channel(address) for address in (envoy.address(), nginx_address)]
                stubs = [stub_of(channel) for channel in channels]
                async with Caller(server) as caller:
                    calls = []
                    for kind, max_tokens in (("runs", 50), ("queues", 3)):
                        for name, stub in zip(("envoy", "nginx"), stubs, strict=True):
                            request = request_of(f"{kind}-{name}", max_tokens)
                            request.only_final = kind == "queues"
                            calls.append((max_tokens, stub.Generate(request)))
                            if len(calls) == 1:  # this one has the row, whichever of the proxies is faster
                                assert (await calls[0][1].read()).WhichOneof("event") == "started"
                    await caller.admin.PauseGeneration(admin_pb2.PauseGenerationRequest(mode=admin_pb2.PAUSE_MODE_KEEP))
                    heard = [asyncio.create_task(rest(call)) for _, call in calls]
                    began = time.monotonic()
                    while time.monotonic() - began < IDLE_S + 2:
                        assert not any(one.done() for one in heard), "a proxy ended a stream"
                        await asyncio.sleep(0.1)
                    await caller.admin.ResumeGeneration(admin_pb2.ResumeGenerationRequest())
                    for (max_tokens, _), one in zip(calls, heard, strict=True):
                        events = await one
                        assert "waiting" in [event.WhichOneof("event") for event in events]
                        assert events[-1].WhichOneof("event") == "done"
                        final = [token for event in events for token in event.finished.token_ids]
                        assert (tokens_of(events) or final) == greedy(PROMPT, max_tokens)
                for channel in channels:
                    await channel.close()
