"""Envoys and TLS: mutual between two of them, as sidecars have it, or the servers' own, which one of them speaks."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from maniple.v1 import inference_pb2
from maniple_client import TransportLost
from support.certificates import Authority, Identity
from support.envoy import Cluster, Door, client_tls, envoys, server_tls
from support.mesh_calls import FLAGS, LONG, PROMPT, client, is_idle, request_of, stub_of, tokens_of
from support.ports import free_ports
from support.scripted_reference import greedy
from support.serve_process import serving


async def test_streams_cancels_and_losses_pass_two_sidecars_with_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours = Identity(tmp_path / "client", authority, "client.mesh")
    theirs = Identity(tmp_path / "server", authority, "server.mesh")
    [port] = free_ports(1)
    between = f"127.0.0.1:{port}"
    with serving(*FLAGS) as server:
        near = (
            Door(route_timeout_s=0),
            Cluster(addresses=[between], tls=client_tls(ours, "server.mesh")),
        )
        far = (
            Door(address=between, route_timeout_s=0, tls=server_tls(theirs, "client.mesh")),
            Cluster(addresses=[server.address]),
        )
        async with (
            asyncio.timeout(90),
            envoys(tmp_path, near, far) as [sidecar, other],
            client(sidecar.address()) as one,
        ):
            stream = one.generate(token_ids=PROMPT, max_tokens=60, ignore_eos=True, temperature=0.0)
            tokens = [token async for event in stream for token in getattr(event, "token_ids", ())]
            assert tokens == greedy(PROMPT, 60)
            assert other.count("listener.*.ssl.handshake") >= 1, "no TLS between them: the test is void"

            cancelled = one.generate(token_ids=PROMPT, max_tokens=LONG, ignore_eos=True)
            await anext(cancelled)
            cancelled.close()
            await is_idle(server)

            # Who shows no certificate, or another one of the same authority, is nobody.
            for names in ((), ("stranger.mesh",)):
                credentials = authority.channel_credentials(*names)
                options = [("grpc.ssl_target_name_override", "server.mesh")]
                async with grpc.aio.secure_channel(between, credentials, options) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stub_of(channel).GetModel(inference_pb2.GetModelRequest(), timeout=10)
                    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

            lost = one.generate(token_ids=PROMPT, max_tokens=LONG, ignore_eos=True)
            async for event in lost:
                if getattr(event, "token_ids", ()):
                    server.signal(signal.SIGKILL)
                    break
            with pytest.raises(TransportLost):
                await lost.text()


async def test_proxy_that_is_given_certificates_spreads_calls_over_servers_with_their_own_tls(tmp_path: Path) -> None:
    """Our TLS hides calls from a proxy. One that shall look into HTTP/2 ends it, and begins its own to the servers."""
    authority = Authority(tmp_path)
    front = Identity(tmp_path / "front", authority, "maniple.mesh")
    proxy = Identity(tmp_path / "proxy", authority, "proxy.mesh")
    flags = [*FLAGS, "--tls-certificate", front.path("certificate"), "--tls-key", front.path("key")]
    flags += ["--tls-client-ca", front.path("ca")]
    with serving(*flags) as one, serving(*flags) as other:
        ends = (
            Door(route_timeout_s=0, tls=server_tls(front, "client.mesh")),
            Cluster(addresses=[one.address, other.address], tls=client_tls(proxy, "maniple.mesh")),
        )
        options = [("grpc.ssl_target_name_override", "maniple.mesh")]
        async with asyncio.timeout(60), envoys(tmp_path, ends) as [envoy]:
            credentials = authority.channel_credentials("client.mesh")
            async with grpc.aio.secure_channel(envoy.address(), credentials, options) as channel:
                for index in range(8):
                    answers = [answer async for answer in stub_of(channel).Generate(request_of(f"t-{index}", 5))]
                    assert tokens_of(answers) == greedy(PROMPT, 5)
            assert sorted(envoy.requests_by_address().values()) == [4, 4]
