"""TLS from files: real servers and real handshakes, renewed while streams run."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from service_chassis.channels import Connection, open_channel
from service_chassis.server import bind, make_server
from service_chassis.tls import ClientTls, ServerTls, TlsFiles, UnusableFile, read_pems
from support.certificates import Authority, Identity
from support.logs import captured_log

DEADLINE_S = 20.0
ECHO, COUNT = "/test.Service/Echo", "/test.Service/Count"


class Server:
    """Echoes, and counts for as long as it is let."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.next = asyncio.Event()


@asynccontextmanager
async def serving(tls: ServerTls | None, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    found = Server("")

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(1000):
            yield str(number).encode()
            await found.next.wait()
            found.next.clear()

    server = make_server(1 << 20)
    methods: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Count": grpc.unary_stream_rpc_method_handler(count),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    found.address = bind(server, address, tls=tls)
    await server.start()
    try:
        yield found
    finally:
        await server.stop(0)


def plain_stub(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    return channel


async def echoes(address: str, credentials: grpc.ChannelCredentials) -> bool:
    """Whether a new connection with these credentials is served."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        try:
            return bool(await channel.unary_unary(ECHO)(b"hello", timeout=DEADLINE_S) == b"hello")
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "other")


async def test_server_with_client_ca_serves_only_whom_it_signed(
    tmp_path: Path, authority: Authority, other: Authority
) -> None:
    identity = Identity(tmp_path / "server", authority, "127.0.0.1")
    certificate, key = other.issue("client.test")
    stranger = grpc.ssl_channel_credentials(authority.pem, key, certificate)
    async with serving(ServerTls(identity.files)) as server:
        assert await echoes(server.address, authority.channel_credentials("client.test"))
        assert not await echoes(server.address, authority.channel_credentials())  # none at all
        assert not await echoes(server.address, stranger)
        assert not await echoes(server.address, authority.channel_credentials("client.test", expired=True))
        assert not await echoes(server.address, other.channel_credentials("client.test"))  # it trusts another
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(ECHO)(b"", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_client_refuses_a_server_that_is_expired_or_another(tmp_path: Path, authority: Authority) -> None:
    expired, key = authority.issue("127.0.0.1", expired=True)
    identity = Identity(tmp_path / "server", authority, "127.0.0.1")
    identity.replace(certificate=expired, key=key, ca=authority.pem)
    async with serving(ServerTls(identity.one_sided)) as server:
        assert not await echoes(server.address, authority.channel_credentials())
    async with serving(ServerTls(Identity(tmp_path / "b", authority, "rank0.test").one_sided)) as server:
        assert not await echoes(server.address, authority.channel_credentials())
        files = TlsFiles(ca=str(authority.path))
        for name, fits in (("rank0.test", True), ("rank1.test", False)):
            async with open_channel(server.address, [], ClientTls(files, server_name=name)) as channel:
                try:
                    assert await channel.unary_unary(ECHO)(b"", timeout=DEADLINE_S) == b""
                    served = True
                except grpc.aio.AioRpcError:
                    served = False
            assert served is fits


async def test_server_takes_renewed_files_and_open_streams_go_on(
    tmp_path: Path, authority: Authority, other: Authority
) -> None:
    identity = Identity(tmp_path / "server", authority, "127.0.0.1")
    async with (
        serving(ServerTls(identity.files)) as server,
        grpc.aio.secure_channel(server.address, authority.channel_credentials("client.test")) as channel,
    ):
        stream = channel.unary_stream(COUNT)(b"", timeout=60)
        assert await stream.read() == b"0"
        identity.renew("127.0.0.1", trusted=other)  # from now on clients of the other authority are let in
        certificate, key = other.issue("client.test")
        newcomer = grpc.ssl_channel_credentials(authority.pem, key, certificate)
        assert await echoes(server.address, newcomer)
        assert not await echoes(server.address, authority.channel_credentials("client.test"))
        for number in (b"1", b"2"):
            server.next.set()
            assert await stream.read() == number
        stream.cancel()


def events_in(log: io.StringIO) -> list[str]:
    return [json.loads(line)["event"] for line in log.getvalue().splitlines()]


def half_written(identity: Identity) -> dict[str, bytes]:
    return {"certificate": b"-----BEGIN CERTIFICATE-----\nMII", "key": b"", "ca": identity.trusted.pem}


def of_another_key(identity: Identity) -> dict[str, bytes]:
    certificate, _ = identity.authority.issue("127.0.0.1")
    _, key = identity.authority.issue("127.0.0.1")
    return {"certificate": certificate, "key": key, "ca": identity.trusted.pem}


def without_authority(identity: Identity) -> dict[str, bytes]:
    certificate, key = identity.authority.issue("127.0.0.1")
    return {"certificate": certificate, "key": key}


@pytest.mark.parametrize("broken", [half_written, of_another_key, without_authority])
async def test_broken_new_files_leave_the_old_ones_in_force_and_are_logged_once(
    tmp_path: Path, authority: Authority, broken: Callable[[Identity], dict[str, bytes]]
) -> None:
    identity = Identity(tmp_path / "server", authority, "127.0.0.1")
    async with serving(ServerTls(identity.files)) as server:
        with captured_log() as log:
            identity.replace(**broken(identity))
            for _ in range(2):
                assert await echoes(server.address, authority.channel_credentials("client.test"))
            assert events_in(log) == ["files.refused"]
            identity.renew("127.0.0.1")
            assert await echoes(server.address, authority.channel_credentials("client.test"))
            assert events_in(log) == ["files.refused", "files.reloaded"]
        assert "PRIVATE" not in log.getvalue()


async def test_connection_shows_renewed_certificates_and_lets_old_streams_end(
    tmp_path: Path, authority: Authority, other: Authority
) -> None:
    served = Identity(tmp_path / "server", authority, "127.0.0.1")
    shown = Identity(tmp_path / "client", authority, "owner.test")
    async with serving(ServerTls(served.files)) as server:
        connection = Connection(server.address, [], ClientTls(shown.files), plain_stub)
        first = connection.stub
        stream = first.unary_stream(COUNT)(b"", timeout=60)
        assert await stream.read() == b"0"
        assert connection.stub is first
        certificate, key = other.issue("owner.test")
        shown.replace(certificate=certificate, key=key, ca=authority.pem)
        served.renew("127.0.0.1", trusted=other)
        assert connection.stub is not first
        assert await connection.stub.unary_unary(ECHO)(b"new", timeout=DEADLINE_S) == b"new"
        server.next.set()
        assert await stream.read() == b"1"
        await connection.close()
        with pytest.raises(asyncio.CancelledError):
            await stream.read()


async def test_unix_socket_speaks_no_tls(tmp_path: Path, authority: Authority) -> None:
    identity = Identity(tmp_path / "server", authority, "127.0.0.1")
    tls = ClientTls(TlsFiles(ca=str(authority.path)))
    async with (
        serving(ServerTls(identity.files), f"unix:{tmp_path}/s.sock") as server,
        open_channel(server.address, [], tls) as channel,
    ):
        assert await channel.unary_unary(ECHO)(b"x", timeout=DEADLINE_S) == b"x"


def test_unusable_file_is_named_with_its_rule(tmp_path: Path, authority: Authority) -> None:
    good = Identity(tmp_path / "good", authority, "127.0.0.1")
    another = Identity(tmp_path / "another", authority, "127.0.0.1")
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    certificate, key = good.path("certificate"), good.path("key")
    for files, place, rule in (
        (TlsFiles(certificate=certificate, key=another.path("key")), "key", "is not the key of the certificate in"),
        (TlsFiles(certificate=certificate, key=certificate), "key", "is not an unencrypted PEM file"),
        (TlsFiles(certificate=key, key=key), "certificate", "is not a PEM file with certificates"),
        (TlsFiles(certificate=certificate, key=key, ca=str(empty)), "ca", "is not a PEM file with certificates"),
        (TlsFiles(certificate="/nowhere", key=key), "certificate", "cannot be read: No such file or directory"),
        (TlsFiles(ca=str(tmp_path)), "ca", "cannot be read: Is a directory"),
    ):
        with pytest.raises(UnusableFile) as caught:
            read_pems(files)
        assert (caught.value.place, caught.value.rule[: len(rule)]) == (place, rule)
    assert "PRIVATE" not in repr(read_pems(good.files))


async def test_connection_has_at_most_so_many_calls_at_a_time() -> None:
    async def wait(request: bytes, context: Any) -> bytes:
        await released.wait()
        return request

    released = asyncio.Event()
    server = make_server(1 << 20, max_concurrent_streams=2)
    methods: dict[str, Any] = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/test.Service/Wait")
        first, second = call(b"1", timeout=DEADLINE_S), call(b"2", timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"3", timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        released.set()
        assert (await first, await second, await call(b"3", timeout=DEADLINE_S)) == (b"1", b"2", b"3")
    await server.stop(0)


def test_channels_and_ports_are_opened_in_one_place_each() -> None:
    """Else somebody's new connection would be in plaintext."""
    root = Path(__file__).parents[2]
    opening = re.compile(r"\b(?:insecure_channel|secure_channel|add_insecure_port|add_secure_port)\(")
    found = {
        str(path.relative_to(root))
        for package in ("control_plane", "worker_service", "service_chassis")
        for path in (root / package).rglob("*.py")
        if opening.search(path.read_text())
    }
    # The last opens what the second told it to, and opens that again.
    opened_again = "service_chassis/surviving_server.py"
    assert found == {"service_chassis/channels.py", "service_chassis/server.py", opened_again}
