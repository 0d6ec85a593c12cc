"""Control planes and workers over mutual TLS: found, watched, taken over and handed over, with strangers outside."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from control_plane.executors.base import RankCallError
from control_plane.executors.remote import RemoteExecutor
from maniple.v1 import rank_health_pb2, rank_health_pb2_grpc, worker_pb2, worker_pb2_grpc
from maniple_client import AsyncClient, PermissionDenied, Tls
from service_chassis.tls import ClientTls, TlsFiles, read_pems
from support.certificates import Authority, Identity
from support.faults import WORKER
from support.ports import free_ports
from support.remote_ranks import RemoteRanks, remote_ranks
from support.scripted_reference import greedy
from support.takeover import ControlPlane, Reading, Ready, StageProgress, prompt_of
from support.waiting import until

RANK, PLANE = "rank.test", "plane.test"


class Place:
    """Certificates of both sides, as files that can be replaced."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / "authority")
        self.ranks = Identity(directory / "ranks", self.authority, RANK)
        self.plane = Identity(directory / "plane", self.authority, PLANE, "127.0.0.1")

    def renew_all(self) -> None:
        """Have another authority sign and be trusted, on all sides at once."""
        self.authority = Authority(self.directory / "next-authority")
        for identity, names in ((self.ranks, [RANK]), (self.plane, [PLANE, "127.0.0.1"])):
            identity.authority = self.authority
            identity.renew(*names, trusted=self.authority)

    def flags(self) -> list[str]:
        """Of a control plane towards its workers."""
        one = self.plane
        files = ["--rank-tls-ca", one.path("ca"), "--rank-tls-certificate", one.path("certificate")]
        return [*files, "--rank-tls-key", one.path("key"), "--rank-tls-server-name", RANK]

    def tls(self, files: TlsFiles | None = None, name: str = RANK) -> ClientTls:
        return ClientTls(files or self.plane.files, server_name=name)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def secured_ranks(place: Place, monkeypatch: pytest.MonkeyPatch, world_size: int = 2) -> Iterator[RemoteRanks]:
    """Run ranks that speak TLS, on the loopback, and let in control planes alone."""
    for name, value in (
        ("TLS_CERTIFICATE", place.ranks.path("certificate")),
        ("TLS_KEY", place.ranks.path("key")),
        ("TLS_CLIENT_CA", place.ranks.path("ca")),
        ("TLS_CLIENT_NAMES", f"{PLANE},other.test"),
    ):
        monkeypatch.setenv(f"MANIPLE_WORKER_{name}", value)
    with remote_ranks(world_size) as ranks:
        yield ranks


async def start(place: Place, addresses: tuple[str, ...], tls: ClientTls | None) -> list[str]:
    """Look for the ranks once, as a control plane does; return their health addresses."""
    executor = RemoteExecutor(addresses, world_size=len(addresses), settings=WORKER, tls=tls)
    try:
        await executor.start(timeout_s=1.0 if tls is None else 20.0)
        replies = await executor.collective_rpc("Describe", worker_pb2.DescribeRequest(), timeout_s=20.0)
        return [reply.health_address for reply in replies]  # type: ignore[attr-defined]
    finally:
        await executor.shutdown(grace_s=0.0)


async def code_of(address: str, credentials: grpc.ChannelCredentials | None, *, health: bool = False) -> str:
    """Return how a call to a rank, or to its health server, ends."""
    options = [("grpc.ssl_target_name_override", RANK)]
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=options)
    )
    async with channel:
        try:
            if health:
                stub: rank_health_pb2_grpc.RankHealthServiceAsyncStub = rank_health_pb2_grpc.RankHealthServiceStub(
                    channel
                )
                await stub.Watch(rank_health_pb2.WatchRequest(), timeout=20).read()
            else:
                worker: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
                await worker.Describe(worker_pb2.DescribeRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def test_ranks_serve_control_planes_alone_on_both_ports(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with secured_ranks(place, monkeypatch, 1) as ranks:
        (health_port,) = await start(place, ranks.addresses, place.tls())
        stranger = Authority(place.directory / "stranger")
        certificate, key = stranger.issue(PLANE)
        forged = grpc.ssl_channel_credentials(place.authority.pem, key, certificate)
        for address, health in ((ranks.addresses[0], False), (f"127.0.0.1{health_port}", True)):
            good = place.authority.channel_credentials(PLANE)
            assert await code_of(address, good, health=health) == "OK"
            # A client of the same authority, such as one that may generate, commands no worker.
            client = place.authority.channel_credentials("client.test")
            assert await code_of(address, client, health=health) == "PERMISSION_DENIED"
            expired = place.authority.channel_credentials(PLANE, expired=True)
            for credentials in (forged, place.authority.channel_credentials(), expired, None):
                assert await code_of(address, credentials, health=health) == "UNAVAILABLE"
        # And a control plane sends nothing to a worker that it does not know.
        with pytest.raises(RankCallError):
            await start(place, ranks.addresses, None)
        executor = RemoteExecutor(ranks.addresses, world_size=1, settings=WORKER, tls=place.tls(name="rank7.test"))
        with pytest.raises(RankCallError, match="not found"):
            await executor.start(timeout_s=1.0)


async def test_probe_is_answered_in_plaintext_beside_ranks_that_speak_tls(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANIPLE_WORKER_PROBE_LISTEN", f"unix:{place.directory}/probe.sock")
    with secured_ranks(place, monkeypatch, 1) as ranks:
        await start(place, ranks.addresses, place.tls())
        async with grpc.aio.insecure_channel(f"unix:{place.directory}/probe.sock") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "maniple.v1.WorkerService"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="is not served here"):
                await stub.Check(health_pb2.HealthCheckRequest(service="maniple.v1.AdminService"), timeout=20)
            worker: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.Describe(worker_pb2.DescribeRequest(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_two_ranks_are_taken_over_after_every_certificate_was_renewed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with secured_ranks(place, monkeypatch) as ranks:
        planes = [ControlPlane(name, place.directory, ranks.addresses, *place.flags()) for name in ("a", "b")]
        try:
            await until(lambda: any(plane.is_ready for plane in planes), "an owner", timeout_s=30.0)
            owner, spare = sorted(planes, key=lambda plane: not plane.is_ready)
            await spare.heard(StageProgress, "wait")
            async with owner.client(spare) as client:
                reading = Reading(client, "r", prompt_of(1), 300)
                await reading.has(20)
                place.renew_all()
                before = len(reading.token_ids)
                await reading.has(before + 20)  # the streams of steps go on, on their old connections
                owner.signal(signal.SIGKILL)
                await reading.whole()
            assert spare.is_ready
            old = Authority(place.directory / "old-clients")
            assert await code_of(ranks.addresses[0], old.channel_credentials(PLANE)) == "UNAVAILABLE"
        finally:
            for plane in planes:
                plane.close()


CALLERS = f"""
[[caller]]
identity = "planes"
scopes = ["relay", "status"]
certificate = "{PLANE}"

[[caller]]
identity = "ann"
scopes = ["inference"]
certificate = "ann.test"

[[caller]]
identity = "bob"
scopes = ["inference"]
certificate = "bob.test"
"""


async def test_control_planes_speak_for_their_clients_and_nobody_else_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.directory / "callers.toml").write_text(CALLERS)
    one = place.plane
    flags = [*place.flags(), "--handover", "--auth-callers", str(place.directory / "callers.toml")]
    flags += ["--tls-certificate", one.path("certificate"), "--tls-key", one.path("key")]
    flags += ["--tls-client-ca", one.path("ca")]
    shown = {name: Identity(place.directory / name, place.authority, f"{name}.test") for name in ("ann", "bob")}

    def client_of(name: str, plane: ControlPlane) -> AsyncClient:
        files = shown[name]
        tls = Tls(ca=str(place.authority.path), certificate=files.path("certificate"), key=files.path("key"))
        return AsyncClient(plane.address, tls=tls, resume_for_s=0)

    with secured_ranks(place, monkeypatch) as ranks:
        planes = []
        try:
            for name, port in zip("ab", free_ports(2), strict=True):
                plane = ControlPlane(name, place.directory, ranks.addresses, *flags, "--listen", f"127.0.0.1:{port}")
                plane.address = f"127.0.0.1:{port}"
                planes.append(plane)
                await (plane.heard(Ready) if name == "a" else plane.heard(StageProgress, "wait"))
            owner, spare = planes
            async with client_of("ann", spare) as ann, client_of("bob", owner) as bob, client_of("ann", owner) as here:
                stream = ann.generate(token_ids=prompt_of(2), request_id="r", max_tokens=4000, ignore_eos=True)
                await anext(stream)
                with pytest.raises(PermissionDenied, match="is another caller's"):
                    await bob.abort("r")  # although the owner saw the other control plane's certificate alone
                assert await here.abort("r")
                assert [event async for event in stream][-1]
                await _refuses_who_only_says_so(owner, place)
            await _handed_over(owner, spare, place, shown["ann"])
        finally:
            for plane in planes:
                plane.close()


async def _refuses_who_only_says_so(owner: ControlPlane, place: Place) -> None:
    credentials = place.authority.channel_credentials("bob.test")
    async with grpc.aio.secure_channel(owner.address, credentials) as channel:
        said = (("maniple-relayed", "1"), ("maniple-relayed-caller-bin", b"ann"))
        call = channel.unary_unary("/maniple.v1.InferenceService/GetModel")
        with pytest.raises(grpc.aio.AioRpcError, match="'bob' passes a call on, which needs the scope relay"):
            await call(b"", metadata=said, timeout=20)


async def _handed_over(owner: ControlPlane, spare: ControlPlane, place: Place, ann: Identity) -> None:
    """A client that cannot resume hears the rest from its old control plane, which asks the next one in its name."""
    prompt = prompt_of(3)
    request = vllm_engine_pb2.GenerateRequest(
        request_id="h",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt),
        sampling_params=vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, n=1),
        stream=True,
    )
    shown = read_pems(ann.files)
    credentials = grpc.ssl_channel_credentials(shown.ca, shown.key, shown.certificate)
    token_ids: list[int] = []
    async with grpc.aio.secure_channel(owner.address, credentials) as channel:
        async for response in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=60):
            token_ids += response.chunk.token_ids
            if len(token_ids) == 20:
                owner.signal(signal.SIGTERM)
    assert token_ids == greedy(prompt, 200)
    assert spare.is_ready
    assert await owner.exit_code() == 0
