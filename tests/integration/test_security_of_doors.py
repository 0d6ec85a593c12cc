"""Who is let in at the doors of a running server: every method of every service, by tokens, certificates and none."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from control_plane.announcement import Ready
from control_plane.doors.method_scopes import SCOPES_OF_METHODS
from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from maniple_client import AsyncClient, Client, Overloaded, PermissionDenied, Tls, Unauthenticated, token_in
from service_chassis.auth import ANY_CALLER, PUBLIC
from service_chassis.callers import ADMIN, INFERENCE, RELAY, STATUS
from support.certificates import Authority, Identity
from support.jwt_issuer import AUDIENCE, ISSUER, Issuer
from support.serve_process import ServeProcess, serving

SLOW = 'scripted:{"step_time_s": 0.02}'
SCOPES = (INFERENCE, STATUS, ADMIN, RELAY)
TOKENS = {scope: f"token-with-the-scope-{scope}" for scope in SCOPES}
ENDLESS = {"max_tokens": 2000, "ignore_eos": True}

StatusCode = grpc.StatusCode


def callers_toml(*more: str) -> str:
    entries = [
        f'[[caller]]\nidentity = "{scope}-only"\nscopes = ["{scope}"]\n'
        f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        for scope, token in TOKENS.items()
    ]
    return "\n".join([*entries, *more])


def entry(identity: str, scopes: Sequence[str], known_by: str, **limits: int) -> str:
    lines = ["[[caller]]", f'identity = "{identity}"', f"scopes = {list(scopes)}".replace("'", '"'), known_by]
    return "\n".join([*lines, *(f"{name} = {value}" for name, value in limits.items())]) + "\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


@pytest.fixture(scope="module")
def authority(place: Path) -> Authority:
    return Authority(place / "authority")


@pytest.fixture(scope="module")
def issuer(place: Path) -> Issuer:
    return Issuer(place / "jwks.json")


@pytest.fixture(scope="module")
def tls(place: Path, authority: Authority) -> Tls:
    """What a client without a certificate needs."""
    return Tls(ca=str(authority.path))


@pytest.fixture(scope="module")
def server(place: Path, authority: Authority, issuer: Issuer) -> Iterator[ServeProcess]:
    """One that speaks TLS and knows callers by tokens of both kinds."""
    identity = Identity(place / "server", authority, "127.0.0.1")
    callers = place / "callers.toml"
    team = [entry(name, [INFERENCE], f'token = "the-token-of-{name}-0123"') for name in ("team-a", "team-b")]
    small = entry("small", [INFERENCE], 'token = "the-token-of-small-0123"', max_requests=1)
    callers.write_text(callers_toml(*team, small))
    flags = ["--model", SLOW, "--auth-callers", str(callers), "--auth-jwks", str(issuer.path)]
    flags += ["--auth-jwt-issuer", ISSUER, "--auth-jwt-audience", AUDIENCE, "--max-num-seqs", "2"]
    flags += ["--tls-certificate", identity.path("certificate"), "--tls-key", identity.path("key")]
    flags += ["--probe-listen", f"unix:{place}/probe.sock", "--max-waiting-per-caller", "1"]
    with serving(*flags) as process:
        process.hear(Ready)  # a test that asks at the probe port alone would not wait for it
        yield process


@asynccontextmanager
async def secured(server: ServeProcess, authority: Authority) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.secure_channel(server.address, authority.channel_credentials()) as channel:
        yield channel


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def methods_served(channel: grpc.aio.Channel, token: str) -> list[str]:
    """Ask the server itself, so that no method is forgotten here."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask(**question: str) -> reflection_pb2.ServerReflectionResponse:
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(**question)]), metadata=bearer(token)
        )
        return await call.read()

    found = []
    for service in (await ask(list_services="")).list_services_response.service:
        answer = await ask(file_containing_symbol=service.name)
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            for described in file.service:
                if f"{file.package}.{described.name}" == service.name:
                    found += [f"/{service.name}/{method.name}" for method in described.method]
    return sorted(set(found))


async def outcome(
    channel: grpc.aio.Channel, method: str, metadata: Sequence[tuple[str, str]] = (), timeout_s: float = 30.0
) -> StatusCode:
    """Send an empty message, whatever the method takes, and return how it ended; OK once something is answered."""
    while True:
        call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=timeout_s)
        try:
            if await call.read() is not grpc.aio.EOF:
                return StatusCode.OK
            return await call.code()
        except grpc.aio.AioRpcError as error:
            # The library's own word where a call of several messages ended before the first was written.
            if error.details() != "Internal error from Core":
                return error.code()
        finally:
            call.cancel()


async def test_every_method_of_every_service_needs_its_scope(server: ServeProcess, authority: Authority) -> None:
    async with secured(server, authority) as channel:
        methods = await methods_served(channel, TOKENS[STATUS])
        assert {method.split("/")[1] for method in methods} >= {
            "maniple.v1.InferenceService",
            "maniple.v1.AdminService",
            "vllm.grpc.engine.VllmEngine",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert set(methods) <= set(SCOPES_OF_METHODS), "a method without a scope is served to nobody"
        for method in methods:
            needed = SCOPES_OF_METHODS[method]
            if needed == PUBLIC:
                assert await outcome(channel, method) is StatusCode.OK, method
                continue
            assert await outcome(channel, method) is StatusCode.UNAUTHENTICATED, method
            assert await outcome(channel, method, bearer("a-token-of-nobody-at-all")) is StatusCode.UNAUTHENTICATED
            covering = {needed, ADMIN} if needed == STATUS else set(SCOPES) if needed == ANY_CALLER else {needed}
            for scope in set(SCOPES) - covering:
                assert await outcome(channel, method, bearer(TOKENS[scope])) is StatusCode.PERMISSION_DENIED, method


@pytest.mark.parametrize("scope", [STATUS, ADMIN])
async def test_scope_covers_its_methods(server: ServeProcess, authority: Authority, scope: str) -> None:
    async with secured(server, authority) as channel:
        for method in await methods_served(channel, TOKENS[scope]):
            # What changes the server for the other tests is left out; that it needs the scope is shown above.
            if SCOPES_OF_METHODS[method] != scope or method.endswith(("Drain", "PauseGeneration", "/Sleep")):
                continue
            code = await outcome(channel, method, bearer(TOKENS[scope]), timeout_s=1.0)
            assert code not in (StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED), method


async def test_tokens_of_the_issuer_and_of_the_file_generate_and_others_are_told_why(
    server: ServeProcess, issuer: Issuer, tls: Tls, place: Path
) -> None:
    path = place / "token"
    path.write_text(issuer.token() + "\n")
    async with AsyncClient(server.address, tls=tls, token=token_in(str(path))) as client:
        assert len(await client.tokenize("hello")) == 5
        issuer.rotate()
        with pytest.raises(Unauthenticated, match="names no key that is known here"):
            await client.tokenize("hello")
        path.write_text(issuer.token("ec-2", exp=1))
        with pytest.raises(Unauthenticated, match=r"has expired \(exp\)"):
            await client.tokenize("hello")
        path.write_text(issuer.token("ec-2"))
        assert len(await client.tokenize("hello")) == 5
        with pytest.raises(PermissionDenied, match="needs the scope status, which 'jwt:ann' does not have"):
            await client.wait_until_ready(timeout_s=20.0)
    with Client(server.address, tls=tls, token=TOKENS[INFERENCE]) as synchronous:
        stream = synchronous.generate(token_ids=[1, 2, 3], max_tokens=3, ignore_eos=True)
        stream.text()
        assert stream.transcript.samples[0].finished is not None
    with pytest.raises(ValueError, match="is not sent to front:50051 in plaintext"):
        Client("front:50051", token="secret")


async def test_requests_belong_to_their_caller(server: ServeProcess, tls: Tls) -> None:
    def client_of(token: str) -> AsyncClient:
        return AsyncClient(server.address, tls=tls, token=token, resume_for_s=0)

    async with (
        client_of("the-token-of-team-a-0123") as a,
        client_of("the-token-of-team-b-0123") as b,
        client_of(TOKENS[INFERENCE]) as unrelated,
    ):
        stream = a.generate(token_ids=[1, 2, 3], request_id="of-a", **ENDLESS)
        async for _ in stream:
            break
        started = stream.transcript.started
        assert started is not None
        for other in (b, unrelated):
            with pytest.raises(PermissionDenied, match="request_id='of-a': is another caller's"):
                await other.abort("of-a")
        stub = other._inference  # a resume token that leaked is worth nothing to others
        resume = inference_pb2.ResumeRequest(request_id="of-a", resume_token=started.resume_token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Resume(resume, timeout=20).read()
        assert caught.value.code() is StatusCode.PERMISSION_DENIED
        assert await a.abort("of-a") is True
        with pytest.raises(PermissionDenied):
            await b.abort("of-a")  # it ended, and its id is still not another's to free
        assert await a.abort("of-a") is False
        assert await b.abort("of-nobody") is False


async def test_callers_have_a_share_each(server: ServeProcess, tls: Tls) -> None:
    async with (
        AsyncClient(server.address, tls=tls, token="the-token-of-small-0123") as small,
        AsyncClient(server.address, tls=tls, token="the-token-of-team-a-0123") as a,
        AsyncClient(server.address, tls=tls, token="the-token-of-team-b-0123") as b,
        AsyncClient(server.address, tls=tls, token=TOKENS[STATUS]) as operator,
    ):
        first = small.generate(token_ids=[9], request_id="s1", **ENDLESS)
        await anext(first)
        with pytest.raises(Overloaded, match="caller 'small' has 1 requests, and may have at most 1") as full:
            await anext(small.generate(token_ids=[9], **ENDLESS))
        assert full.value.retry_after_s == 1.0
        second = a.generate(token_ids=[8], request_id="a1", **ENDLESS)
        await anext(second)  # the batch of two rows is full, so the next one waits
        third = asyncio.ensure_future(anext(a.generate(token_ids=[8], request_id="a2", **ENDLESS)))
        deadline = time.monotonic() + 20
        while not (await operator.status()).groups[0].num_waiting:
            assert time.monotonic() < deadline, "the second request of team-a never waited"
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="caller 'team-a' has 1 requests waiting"):
            await anext(a.generate(token_ids=[8], **ENDLESS))
        others = asyncio.ensure_future(anext(b.generate(token_ids=[7], request_id="b1", **ENDLESS)))
        assert await small.abort("s1")
        await third
        assert await a.abort("a1")
        await others
        for client, request_id in ((a, "a2"), (b, "b1")):
            await client.abort(request_id)


async def test_share_of_a_caller_is_the_same_on_one_stream_and_while_grammars_are_compiled(
    server: ServeProcess, tls: Tls, authority: Authority
) -> None:
    async with secured(server, authority) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(metadata=bearer("the-token-of-small-0123"), timeout=60)
        for number in range(6):
            sampling = {"ignore_eos": True, "structured_outputs": {"regex": "[a-z]*"}}
            request = service_pb2.ModelInferRequest(id=str(number))
            for name, value in (("text_input", "hi"), ("sampling_parameters", json.dumps(sampling))):
                tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
                tensor.contents.bytes_contents.append(value.encode())
            await call.write(request)
        refused = [await call.read() for _ in range(5)]
        assert {one.error_message[:18] for one in refused} == {"RESOURCE_EXHAUSTED"}
        assert all("caller 'small' has 1 requests" in one.error_message for one in refused)
        call.cancel()


async def test_probe_port_speaks_plaintext_and_says_health_alone(server: ServeProcess, place: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{place}/probe.sock") as channel:
        check = health_pb2.HealthCheckRequest(service="maniple.v1.InferenceService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(check, timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for method in ("/maniple.v1.AdminService/GetStatus", "/maniple.v1.InferenceService/GetModel"):
            assert await outcome(channel, method) is StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(server.address) as channel:
        assert await outcome(channel, "/grpc.health.v1.Health/Check") is StatusCode.UNAVAILABLE


# Without authentication


async def test_administration_is_closed_where_others_can_connect_and_nobody_is_known(place: Path) -> None:
    with serving("--model", "scripted", "--listen", "0.0.0.0:0") as open_one:
        address = open_one.address.replace("0.0.0.0", "127.0.0.1")
        async with grpc.aio.insecure_channel(address) as channel:
            methods = await methods_served(channel, "a token that nobody asked for")
            closed = [method for method in methods if SCOPES_OF_METHODS[method] in (STATUS, ADMIN)]
            assert len(closed) > 15
            for method in closed:
                assert await outcome(channel, method) is StatusCode.PERMISSION_DENIED, method
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=20)
            assert "give --auth-callers or --auth-jwks, or --admin-listen" in (caught.value.details() or "")
            assert await outcome(channel, "/maniple.v1.InferenceService/GetModel") is StatusCode.OK


async def test_administration_is_served_at_an_address_of_its_own(place: Path) -> None:
    socket = place / "admin.sock"
    at = f"unix:{socket}"
    with serving("--model", "scripted", "--listen", "0.0.0.0:0", "--admin-listen", at) as process:
        address = process.address.replace("0.0.0.0", "127.0.0.1")
        async with grpc.aio.insecure_channel(address) as doors, grpc.aio.insecure_channel(at) as admin:
            with pytest.raises(grpc.aio.AioRpcError, match="is served at --admin-listen"):
                await admin_pb2_grpc.AdminServiceStub(doors).GetStatus(admin_pb2.GetStatusRequest(), timeout=20)
            status = await admin_pb2_grpc.AdminServiceStub(admin).GetStatus(admin_pb2.GetStatusRequest(), timeout=20)
            assert status.ready
            assert await outcome(admin, "/maniple.v1.InferenceService/GetModel") is StatusCode.UNIMPLEMENTED
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0
    assert socket.name not in os.listdir(place)


# Certificates


async def test_certificates_name_callers_and_are_renewed_while_streams_run(place: Path) -> None:
    authority, other = Authority(place / "m1"), Authority(place / "m2")
    identity = Identity(place / "mtls", authority, "127.0.0.1")
    ann, console = (Identity(place / name, authority, f"{name}.test") for name in ("ann", "console"))
    callers = place / "by-certificate.toml"
    known = [entry(name, scopes, f'certificate = "{name}.test"') for name, scopes in (("ann", [INFERENCE]),)]
    callers.write_text("\n".join([*known, entry("console", [ADMIN], 'certificate = "console.test"')]))
    flags = ["--tls-certificate", identity.path("certificate"), "--tls-key", identity.path("key")]
    flags += ["--tls-client-ca", identity.path("ca"), "--auth-callers", str(callers), "--model", SLOW]

    def shown(one: Identity) -> Tls:
        return Tls(ca=str(authority.path), certificate=one.path("certificate"), key=one.path("key"))

    with serving(*flags) as process:
        async with (
            AsyncClient(process.address, tls=shown(ann)) as client,
            AsyncClient(process.address, tls=shown(console)) as operator,
        ):
            stream = client.generate(token_ids=[1], request_id="long", max_tokens=100, ignore_eos=True)
            await anext(stream)
            assert (await operator.status()).ready
            with pytest.raises(PermissionDenied, match="needs the scope status, which 'ann' does not have"):
                await client.status()
            # The server's files are replaced, and so is the authority of clients: new connections need the new one.
            identity.renew("127.0.0.1", trusted=other)
            for one, name in ((ann, "ann.test"), (console, "stranger.test")):
                certificate, key = other.issue(name)
                one.replace(certificate=certificate, key=key, ca=authority.pem)
            assert len(await client.tokenize("hello")) == 5
            with pytest.raises(Unauthenticated, match="a certificate that is listed"):
                await operator.status()
            async for _ in stream:
                pass
            assert len(stream.transcript.samples[0].token_ids) == 100


def test_command_reaches_a_server_by_tls_and_token(server: ServeProcess, authority: Authority, place: Path) -> None:
    (place / "of-status").write_text(TOKENS[STATUS])
    words = ["--server", server.address, "--tls-ca", str(authority.path), "--token-file", str(place / "of-status")]
    command = [sys.executable, "-m", "control_plane.cli"]
    done = subprocess.run([*command, "status", *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "ready" in done.stdout) == (0, True), done.stderr
    refused = subprocess.run([*command, "generate", "hi", *words], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, "needs the scope inference" in refused.stderr) == (1, True)
    words[-1] = str(place / "nowhere")
    missing = subprocess.run([*command, "status", *words], capture_output=True, text=True, timeout=60)
    assert (missing.returncode, "No such file" in missing.stderr) == (2, True)


async def test_message_over_the_limit_is_refused_before_anybody_is_asked_for_a_token(
    server: ServeProcess, authority: Authority
) -> None:
    prompt = inference_pb2.TokenIds(ids=[1] * (5 << 20))
    request = inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling_pb2.SamplingParams(max_tokens=1))
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.secure_channel(server.address, authority.channel_credentials(), options=options) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        for metadata, code in (
            (bearer(TOKENS[INFERENCE]), StatusCode.INVALID_ARGUMENT),
            ((), StatusCode.UNAUTHENTICATED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, metadata=metadata, timeout=30).read()
            assert caught.value.code() is code
