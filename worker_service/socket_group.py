"""Connect the ranks of a group by sockets: a star around rank 0, in plain Python.

Rank 0 listens from its start; the others come when the group is formed, say the formation's name and their rank, and
stay. Messages are frames of a u32 length and that many bytes; there is no other state. To the centre and back takes
less than 0.1 ms with three ranks on loopback.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from service_chassis.telemetry import get_logger
from worker_service.process_group import OUTPUT_RANK, BrokenCollective, Bytes

_MAX_HELLO_BYTES = 4096
_HELLO_TIMEOUT_S = 2.0  # whoever connects and says nothing does not keep the others waiting
_RETRY_S = 0.05


class Rendezvous:
    """Where rank 0 waits for the others. Open as long as the process lives, so that a group can be formed again."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of ``host``."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host.strip("[]"), 0), family=family, backlog=256)
        self.port: int = self._listener.getsockname()[1]

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Return the next connection, or None when time is over."""
        self._listener.settimeout(max(timeout_s, 0.001))
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        return connection

    def close(self) -> None:
        self._listener.close()


class SocketProcessGroup:
    """A ``ProcessGroup``; see there.

    Args:
        formation_id: of the group.
        rank: of this process.
        links: on rank 0 a connection to each other rank, ascending; elsewhere the one to rank 0.
        num_sharing: ranks on the same cores.
    """

    backend = "sockets"

    def __init__(self, formation_id: str, rank: int, world_size: int, links: list[socket.socket], num_sharing: int):
        self.formation_id = formation_id
        self.rank = rank
        self.world_size = world_size
        self.num_sharing = num_sharing
        self.host: str = links[0].getsockname()[0]
        self._links = links
        self._on_abort: list[Callable[[], None]] = []
        self._aborted = False
        self._lock = threading.Lock()
        for link in links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(None)

    def broadcast(self, content: Bytes) -> Bytes:
        if self.rank != OUTPUT_RANK:
            return self._receive(OUTPUT_RANK, self._links[0])
        for other, link in enumerate(self._links, start=1):
            self._send(other, link, content)
        return content

    def gather(self, content: Bytes) -> list[Bytes] | None:
        if self.rank != OUTPUT_RANK:
            self._send(OUTPUT_RANK, self._links[0], content)
            return None
        return [content, *(self._receive(other, link) for other, link in enumerate(self._links, start=1))]

    def barrier(self) -> None:
        self.gather(b"")
        self.broadcast(b"")

    def _send(self, other: int, link: socket.socket, content: Bytes) -> None:
        try:
            _send_frame(link, content)
        except OSError as error:
            raise self._broken(other, error) from None

    def _receive(self, other: int, link: socket.socket) -> bytearray:
        try:
            return _receive_frame(link)
        except OSError as error:
            raise self._broken(other, error) from None

    def _broken(self, other: int, error: OSError) -> BrokenCollective:
        if self._aborted:
            return BrokenCollective("the group was aborted")
        return BrokenCollective(f"the connection to rank {other} broke ({error})")

    def on_abort(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._aborted:
                self._on_abort.append(callback)
                return
        callback()

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            callbacks = self._on_abort
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it; closing would not
        for callback in callbacks:
            callback()


def form_socket_group(
    formation_id: str, rank: int, world_size: int, *, rendezvous: str, listener: Rendezvous | None, timeout_s: float
) -> SocketProcessGroup:
    """Form a group of several ranks; returns when all have come.

    Args:
        formation_id: what all of them must say.
        rank: of this process.
        world_size: ranks of the group.
        rendezvous: host:port of rank 0's ``Rendezvous``.
        listener: that, on rank 0.
        timeout_s: how long to wait for the others.

    Raises:
        TimeoutError: names the ranks that did not come.
    """
    deadline = time.monotonic() + timeout_s
    if rank != OUTPUT_RANK:
        link = _connect(rendezvous, deadline)
        _send_frame(link, json.dumps({"formation_id": formation_id, "rank": rank, "cores": _cores()}).encode())
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sharing = json.loads(_receive_frame(link))
        except OSError as error:
            link.close()
            raise TimeoutError(
                f"rank 0 did not form the group at {rendezvous} within {timeout_s:g} s ({error})"
            ) from None
        return SocketProcessGroup(formation_id, rank, world_size, [link], sharing[rank])
    assert listener is not None, "rank 0 listens from its start"
    links: dict[int, socket.socket] = {}
    cores = {OUTPUT_RANK: _cores()}
    while len(links) < world_size - 1:
        connection = listener.accept(deadline - time.monotonic())
        if connection is None:
            for link in links.values():
                link.close()
            missing = ", ".join(str(other) for other in range(1, world_size) if other not in links)
            raise TimeoutError(f"rank {missing} did not come to rank 0 at port {listener.port} within {timeout_s:g} s")
        hello = _read_hello(connection)
        other = hello.get("rank")
        if hello.get("formation_id") != formation_id or not isinstance(other, int) or not 0 < other < world_size:
            get_logger().warning("rendezvous.refused", rank=other, formation_id=hello.get("formation_id"))
            connection.close()
            continue
        if other in links:  # it lost its first connection on the way
            links[other].close()
        links[other], cores[other] = connection, str(hello.get("cores"))
    on_same = Counter(cores.values())
    sharing = json.dumps([on_same[cores[one]] for one in range(world_size)]).encode()
    ordered = [links[other] for other in range(1, world_size)]
    group = SocketProcessGroup(formation_id, rank, world_size, ordered, on_same[cores[OUTPUT_RANK]])
    group.broadcast(sharing)
    return group


def _connect(rendezvous: str, deadline: float) -> socket.socket:
    host, _, port = rendezvous.rpartition(":")
    while True:
        left_s = deadline - time.monotonic()
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=max(left_s, 0.001))
        except OSError as error:
            if left_s <= _RETRY_S:
                raise TimeoutError(f"rank 0 cannot be reached at {rendezvous} ({error})") from None
            time.sleep(_RETRY_S)


def _read_hello(connection: socket.socket) -> dict[str, object]:
    """Return what a newcomer says, or nothing: anybody may connect."""
    connection.settimeout(_HELLO_TIMEOUT_S)
    try:
        hello = json.loads(_receive_frame(connection, at_most=_MAX_HELLO_BYTES))
    except (OSError, ValueError):
        return {}
    return hello if isinstance(hello, dict) else {}


def _cores() -> str:
    """Name the cores that this process may use: equal for processes that share them."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    text = f"{machine} {sorted(os.sched_getaffinity(0))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _send_frame(link: socket.socket, content: Bytes) -> None:
    header = len(content).to_bytes(4, "little")
    sent = link.sendmsg([header, content]) - len(header)  # one packet where it is small
    if sent < len(content):
        link.sendall(memoryview(content)[max(sent, 0) :])


def _receive_frame(link: socket.socket, *, at_most: int = 1 << 30) -> bytearray:
    length = int.from_bytes(_receive_exactly(link, 4), "little")
    if length > at_most:
        raise ConnectionError(f"a message of {length} bytes")
    return _receive_exactly(link, length)


def _receive_exactly(link: socket.socket, count: int) -> bytearray:
    received = bytearray(count)
    left = memoryview(received)
    while left:
        num_bytes = link.recv_into(left)
        if not num_bytes:
            raise ConnectionError("it was closed")
        left = left[num_bytes:]
    return received
