"""Run the ranks of one group as threads of this process: as quick as one rank, since torch is imported once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from worker_service.socket_group import Patience, Rendezvous, SocketProcessGroup, form_socket_group

T = TypeVar("T")
DEADLINE_S = 60.0


def run_ranks(world_size: int, body: Callable[[SocketProcessGroup], T], *, formation_id: str = "f") -> list[T]:
    """Form a group of threads, run ``body`` on each rank, and return what they returned, in rank order.

    The first failure aborts the group, so that the others come back, and is raised.
    """
    groups: list[SocketProcessGroup] = []
    listener = Rendezvous("127.0.0.1")

    def run(rank: int) -> T:
        group = form_socket_group(
            formation_id,
            rank,
            world_size,
            rendezvous=f"127.0.0.1:{listener.port}",
            listener=listener if rank == 0 else None,
            patience=Patience(DEADLINE_S),
        )
        groups.append(group)
        return body(group)

    pool = ThreadPoolExecutor(world_size)
    futures = [pool.submit(run, rank) for rank in range(world_size)]
    try:
        done, not_done = wait(futures, timeout=DEADLINE_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        assert not not_done, "the ranks hang"
        return [future.result() for future in futures]
    finally:
        for group in groups:
            group.abort()
        listener.close()
        pool.shutdown(wait=True, cancel_futures=True)


def stranger(port: int, content: bytes) -> socket.socket:
    """Connect to a rendezvous and say something that no rank says."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(content)
    return connection
