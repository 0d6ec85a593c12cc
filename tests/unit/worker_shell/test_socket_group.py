"""Ranks connected by sockets: they find each other, agree, and come back when one is gone."""

from __future__ import annotations

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from service_chassis.protocol.failure_kinds import BROKEN_COLLECTIVE
from support.thread_ranks import run_ranks, stranger
from worker_service.process_group import BrokenCollective
from worker_service.socket_group import FormationGivenUp, Patience, Rendezvous, SocketProcessGroup, form_socket_group


def form(rank: int, world_size: int, listener: Rendezvous, *, name: str = "f", timeout_s: float = 10.0):  # type: ignore[no-untyped-def]
    return form_socket_group(
        name,
        rank,
        world_size,
        rendezvous=f"127.0.0.1:{listener.port}",
        listener=listener if rank == 0 else None,
        patience=Patience(timeout_s),
    )


@pytest.fixture
def listener():  # type: ignore[no-untyped-def]
    with_port = Rendezvous("127.0.0.1")
    yield with_port
    with_port.close()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_gets_what_rank_0_says(world_size: int) -> None:
    def body(group: SocketProcessGroup) -> list[bytes]:
        assert (group.world_size, group.formation_id, group.backend) == (world_size, "f", "sockets")
        assert group.num_sharing == world_size  # one machine, the same cores
        said = []
        for size in (0, 1, 70_000, 3_000_000):
            group.barrier()
            said.append(bytes(group.broadcast(bytes([group.rank]) * size)))
        return said

    for said in run_ranks(world_size, body):
        assert said == [b"\0" * size for size in (0, 1, 70_000, 3_000_000)]


def test_rank_0_gathers_in_rank_order() -> None:
    def body(group: SocketProcessGroup) -> list[bytes] | None:
        parts = group.gather(struct.pack("<i", group.rank) * 100_000)
        return None if parts is None else [bytes(part[:4]) for part in parts]

    assert run_ranks(4, body) == [[struct.pack("<i", rank) for rank in range(4)], None, None, None]


def test_barrier_holds_all_until_the_last_comes() -> None:
    last_came = threading.Event()

    def body(group: SocketProcessGroup) -> bool:
        if group.rank == 2:
            time.sleep(0.05)
            last_came.set()
        group.barrier()
        return last_came.is_set()

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_ranks_come_back_when_one_leaves(leaver: int) -> None:
    def body(group: SocketProcessGroup) -> str:
        if group.rank == leaver:
            group.abort()
            return "left"
        with pytest.raises(BrokenCollective) as caught:
            group.barrier()
        if group.rank == 0:
            group.abort()  # as a rank does that is told to leave: the rest then comes back too
        return str(caught.value)

    said = run_ranks(3, body)
    assert said[leaver] == "left"
    if leaver != 0:
        assert f"rank {leaver}" in said[0]


def test_abort_brings_the_device_thread_back_and_tells_others_who_asked(listener: Rendezvous) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(form, 0, 2, listener), pool.submit(form, 1, 2, listener)
        group, other = first.result(), second.result()
        waiting = pool.submit(group.barrier)  # the other never comes
        told: list[str] = []
        group.on_abort(lambda: told.append("early"))
        group.abort()
        group.abort()
        group.on_abort(lambda: told.append("late"))
        with pytest.raises(BrokenCollective, match="the group was aborted"):
            waiting.result(timeout=5)
        assert told == ["early", "late"]
        other.abort()


def test_missing_rank_is_named_when_time_is_over(listener: Rendezvous) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(form, 0, 4, listener, timeout_s=0.3)
        second = pool.submit(form, 2, 4, listener, timeout_s=0.6)
        with pytest.raises(
            TimeoutError, match=rf"rank 1, 3 did not come to rank 0 at port {listener.port} within 0.3 s"
        ):
            first.result()
        with pytest.raises(TimeoutError, match="rank 0 did not form the group"):
            second.result()


def test_rank_0_that_nobody_reaches_is_named() -> None:
    gone = Rendezvous("127.0.0.1")
    gone.close()
    with pytest.raises(TimeoutError, match=rf"rank 0 cannot be reached at 127.0.0.1:{gone.port}"):
        form(1, 2, gone, timeout_s=0.2)


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 29) + b'{"formation_id":"x","rank":1}',
        struct.pack("<I", 29) + b'{"formation_id":"f","rank":9}',
    ],
    ids=["http", "no-json", "no-object", "other-formation", "other-rank"],
)
def test_strangers_at_the_rendezvous_do_no_harm(listener: Rendezvous, content: bytes) -> None:
    uninvited = stranger(listener.port, content)
    with ThreadPoolExecutor(2) as pool:
        groups = [pool.submit(form, rank, 2, listener) for rank in range(2)]
        for group in groups:
            assert group.result().world_size == 2
        for group in groups:
            group.result().abort()
    uninvited.close()


def test_group_is_formed_again_at_the_same_rendezvous(listener: Rendezvous) -> None:
    with ThreadPoolExecutor(2) as pool:
        for name in ("first", "second"):
            groups = [future.result() for future in [pool.submit(form, r, 2, listener, name=name) for r in range(2)]]
            said = list(pool.map(lambda group: bytes(group.broadcast(b"x")), groups))
            assert said == [b"x", b"x"]
            for group in groups:
                group.abort()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_waits_for_others_comes_back_when_the_formation_is_given_up(rank: int, listener: Rendezvous) -> None:
    patience = Patience(60.0)

    def wait() -> SocketProcessGroup:
        here = listener if rank == 0 else None
        return form_socket_group(
            "f", rank, 3, rendezvous=f"127.0.0.1:{listener.port}", listener=here, patience=patience
        )

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(wait)
        other = pool.submit(form, 2, 3, listener, timeout_s=0.5)  # rank 0 waits for one more; rank 1 for rank 0 alone
        with pytest.raises(TimeoutError):
            other.result()
        assert not waiting.done()
        patience.give_up()
        with pytest.raises(FormationGivenUp):
            waiting.result(timeout=5)
    patience.close()


@pytest.mark.parametrize("content", [b"", struct.pack("<I", 60) + b"half"], ids=["nothing", "half a hello"])
def test_silent_stranger_does_not_hold_up_giving_up(listener: Rendezvous, content: bytes) -> None:
    uninvited = stranger(listener.port, content)
    patience = Patience(60.0)
    patience.give_up()  # before anybody waits
    with pytest.raises(FormationGivenUp):
        form_socket_group("f", 0, 2, rendezvous="", listener=listener, patience=patience)
    patience.close()
    uninvited.close()


def test_rank_comes_again_when_rank_0_begins_anew(listener: Rendezvous) -> None:
    first = Patience(60.0)
    with ThreadPoolExecutor(3) as pool:
        early = pool.submit(form, 1, 3, listener, timeout_s=20)
        given_up = pool.submit(form_socket_group, "f", 0, 3, rendezvous="", listener=listener, patience=first)
        time.sleep(0.05)
        first.give_up()
        with pytest.raises(FormationGivenUp):
            given_up.result(timeout=5)
        groups = [pool.submit(form, rank, 3, listener) for rank in (0, 2)]
        for group in (early, *groups):
            assert group.result(timeout=10).world_size == 3
        for group in (early, *groups):
            group.result().abort()
    first.close()


def test_owner_knows_a_broken_collective_by_the_name_of_its_class() -> None:
    assert BrokenCollective.__name__ == BROKEN_COLLECTIVE
