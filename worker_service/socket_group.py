"""Connect the ranks of a group by sockets: a star around rank 0, in plain Python.

Rank 0 listens from its start; the others come when the group is formed, say the formation's name and their rank, and
stay. Messages are frames of a u32 length and that many bytes; there is no other state. To the centre and back takes
less than 0.1 ms with three ranks on loopback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import select
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


class FormationGivenUp(Exception):
    """Nobody wants the group any more that was being formed."""


class Patience:
    """How long the ranks of a formation wait for each other, unless it is given up first."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._ear, self._mouth = socket.socketpair()

    @property
    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def give_up(self) -> None:
        """Bring back whoever waits, now or later. Any thread, safe twice."""
        with contextlib.suppress(OSError):
            self._mouth.send(b"!")

    def wait(self, link: socket.socket | None, event: int = select.POLLIN, *, at_most_s: float | None = None) -> bool:
        """Wait until a socket can be read, or ``event`` comes; say whether it did in time. None only passes the time.

        Raises:
            FormationGivenUp: ``give_up`` was called.
        """
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        if link is not None:
            poll.register(link, event)
        left_s = self.left_s if at_most_s is None else min(self.left_s, at_most_s)
        ready = [number for number, _ in poll.poll(left_s * 1000)]
        if self._ear.fileno() in ready:
            raise FormationGivenUp
        return bool(ready)

    def close(self) -> None:
        self._ear.close()
        self._mouth.close()


class Rendezvous:
    """Where rank 0 waits for the others. Open as long as the process lives, so that a group can be formed again."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of ``host``."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host.strip("[]"), 0), family=family, backlog=256)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def accept(self, patience: Patience) -> socket.socket | None:
        """Return the next connection, or None when time is over."""
        while patience.wait(self._listener):
            with contextlib.suppress(BlockingIOError):  # it went before it was taken
                connection, _ = self._listener.accept()
                connection.setblocking(True)
                return connection
        return None

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
    formation_id: str, rank: int, world_size: int, *, rendezvous: str, listener: Rendezvous | None, patience: Patience
) -> SocketProcessGroup:
    """Form a group of several ranks; returns when all have come.

    Args:
        formation_id: what all of them must say.
        rank: of this process.
        world_size: ranks of the group.
        rendezvous: host:port of rank 0's ``Rendezvous``.
        listener: that, on rank 0.
        patience: how long to wait for the others.

    Raises:
        TimeoutError: names the ranks that did not come.
        FormationGivenUp: as ``Patience.wait``.
    """
    if rank != OUTPUT_RANK:
        return _come_to_rank_0(formation_id, rank, world_size, rendezvous, patience)
    assert listener is not None, "rank 0 listens from its start"
    links: dict[int, socket.socket] = {}
    try:
        return _gather_ranks(formation_id, world_size, listener, patience, links)
    except BaseException:
        for link in links.values():
            link.close()
        raise


def _gather_ranks(
    formation_id: str, world_size: int, listener: Rendezvous, patience: Patience, links: dict[int, socket.socket]
) -> SocketProcessGroup:
    """On rank 0: take the others in as they come; ``links`` are the connections so far."""
    cores = {OUTPUT_RANK: _cores()}
    while len(links) < world_size - 1:
        connection = listener.accept(patience)
        if connection is None:
            missing = ", ".join(str(other) for other in range(1, world_size) if other not in links)
            came = f"did not come to rank 0 at port {listener.port} within {patience.timeout_s:g} s"
            raise TimeoutError(f"rank {missing} {came}")
        try:
            hello = _read_hello(connection, patience)
        except FormationGivenUp:
            connection.close()
            raise
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
    group = SocketProcessGroup(formation_id, OUTPUT_RANK, world_size, ordered, on_same[cores[OUTPUT_RANK]])
    group.broadcast(sharing)
    return group


def _come_to_rank_0(
    formation_id: str, rank: int, world_size: int, rendezvous: str, patience: Patience
) -> SocketProcessGroup:
    """On another rank: say who we are, until rank 0 says that all have come.

    A connection that rank 0 closes is made again: it may have given up a formation of an owner before ours, or we may
    be the ones who are late to hear of a new one.
    """
    hello = json.dumps({"formation_id": formation_id, "rank": rank, "cores": _cores()}).encode()
    while True:
        link = _connect(rendezvous, patience)
        try:
            _send_frame(link, hello)
            sharing = json.loads(_receive_frame(link, before=functools.partial(_wait_for, link, patience)))
        except TimeoutError as error:
            link.close()
            within = f"within {patience.timeout_s:g} s ({error})"
            raise TimeoutError(f"rank 0 did not form the group at {rendezvous} {within}") from None
        except OSError:
            link.close()
            patience.wait(None, at_most_s=_RETRY_S)
        except BaseException:
            link.close()
            raise
        else:
            return SocketProcessGroup(formation_id, rank, world_size, [link], sharing[rank])


def _wait_for(link: socket.socket, patience: Patience, at_most_s: float | None = None) -> None:
    if not patience.wait(link, at_most_s=at_most_s):
        raise TimeoutError("timed out")


def _connect(rendezvous: str, patience: Patience) -> socket.socket:
    host, _, port = rendezvous.rpartition(":")
    while True:
        try:
            return _connected(host.strip("[]"), int(port), patience)
        except OSError as error:
            if patience.left_s <= _RETRY_S:
                raise TimeoutError(f"rank 0 cannot be reached at {rendezvous} ({error})") from None
            patience.wait(None, at_most_s=_RETRY_S)


def _connected(host: str, port: int, patience: Patience) -> socket.socket:
    """Return a connection; as ``socket.create_connection``, but it can be given up."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    link = socket.socket(family, kind, protocol)
    try:
        link.setblocking(False)
        if (code := link.connect_ex(address)) == errno.EINPROGRESS:
            if not patience.wait(link, select.POLLOUT):
                raise TimeoutError("timed out")
            code = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        link.setblocking(True)
    except BaseException:
        link.close()
        raise
    return link


def _read_hello(connection: socket.socket, patience: Patience) -> dict[str, object]:
    """Return what a newcomer says, or nothing: anybody may connect."""
    until = time.monotonic() + _HELLO_TIMEOUT_S

    def before() -> None:
        _wait_for(connection, patience, max(until - time.monotonic(), 0.0))

    try:
        hello = json.loads(_receive_frame(connection, at_most=_MAX_HELLO_BYTES, before=before))
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


def _receive_frame(
    link: socket.socket, *, at_most: int = 1 << 30, before: Callable[[], None] | None = None
) -> bytearray:
    length = int.from_bytes(_receive_exactly(link, 4, before), "little")
    if length > at_most:
        raise ConnectionError(f"a message of {length} bytes")
    return _receive_exactly(link, length, before)


def _receive_exactly(link: socket.socket, count: int, before: Callable[[], None] | None = None) -> bytearray:
    """Read so many bytes; ``before`` is called before each part, and returns when there is one."""
    received = bytearray(count)
    left = memoryview(received)
    while left:
        if before is not None:
            before()
        num_bytes = link.recv_into(left)
        if not num_bytes:
            raise ConnectionError("it was closed")
        left = left[num_bytes:]
    return received
