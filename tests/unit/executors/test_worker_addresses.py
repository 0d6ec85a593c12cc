from __future__ import annotations

import socket
from pathlib import Path

import pytest

from control_plane.executors.worker_addresses import (
    address_rule,
    beside,
    nothing_listens,
    one_per_rank,
    resolve,
)


@pytest.mark.parametrize(
    "address", ["a:1", "10.0.0.1:65535", "[::1]:5", "unix:/run/w.sock", "dns:///workers.ns.svc:50061"]
)
def test_address_is_fine(address: str) -> None:
    assert address_rule(address) == ""


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "dns:///a", "dns:///:1"])
def test_address_is_refused_with_what_it_must_be(address: str) -> None:
    assert address_rule(address) == "must be HOST:PORT, unix:PATH or dns:///NAME:PORT"
    assert address_rule("unix:") == "must be unix:PATH"


@pytest.mark.parametrize(
    ("hosts", "world_size", "expected"),
    [
        (["a:1"], 1, ("a:1",)),
        (["b:1", "a:7"], 2, ("b:1", "a:7")),
        (["a:1"], 3, ("a:1", "a:2", "a:3")),
        (["a:1", "[::1]:8"], 4, ("a:1", "a:2", "[::1]:8", "[::1]:9")),
        (["unix:/a"], 1, ("unix:/a",)),
        (["unix:/a"], 2, ()),  # a socket has no next port
        (["a:1", "b:1"], 3, ()),
        (["a:1", "b:1", "c:1"], 2, ()),
        ([], 1, ()),
    ],
)
def test_addresses_are_spread_over_ranks(hosts: list[str], world_size: int, expected: tuple[str, ...]) -> None:
    assert one_per_rank(hosts, world_size) == expected


@pytest.mark.parametrize(
    ("target", "health_address", "expected"),
    [
        ("10.0.0.1:50061", ":50062", "10.0.0.1:50062"),
        ("[fd00::1]:50061", ":50062", "[fd00::1]:50062"),
        ("unix:/w", ":50062", "localhost:50062"),
        ("unix:/w", "unix:/h", "unix:/h"),
        ("a:1", "b:2", "b:2"),
    ],
)
def test_port_alone_is_on_the_same_host(target: str, health_address: str, expected: str) -> None:
    assert beside(target, health_address) == expected


async def test_name_stands_for_sorted_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str, port: int, **_: object) -> list[object]:
        assert (host, port) == ("workers", 7)
        v4 = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{last}", 7)) for last in (9, 2, 2)]
        return [*v4, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 7, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *_, **__: lookup(host, port))
    assert await resolve(["dns:///workers:7"]) == ("10.0.0.2:7", "10.0.0.9:7", "[fd00::1]:7")
    assert await resolve(["b:1", "a:1", "b:1"]) == ("b:1", "a:1")


async def test_unknown_name_is_named() -> None:
    with pytest.raises(OSError, match=r"no-such-host\.invalid cannot be resolved"):
        await resolve(["dns:///no-such-host.invalid:1"])


async def test_only_a_refusal_says_that_nothing_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not await nothing_listens(f"127.0.0.1:{port}", timeout_s=1.0)
    assert await nothing_listens(f"127.0.0.1:{port}", timeout_s=1.0)
    path = tmp_path / "s"
    assert await nothing_listens(f"unix:{path}", timeout_s=1.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert await nothing_listens(f"unix:{path}", timeout_s=1.0), "bound, and nobody listens"
        listener.listen()
        assert not await nothing_listens(f"unix:{path}", timeout_s=1.0)
    # A host that says nothing (TEST-NET-1 goes nowhere) is silence, and not an answer.
    assert not await nothing_listens("no-such-host.invalid:1", timeout_s=0.2)
