"""Call every method of a service with whatever comes, and see that it stays well.

Which methods there are, and what they take, a server says itself, by reflection. So a door that is added to a server
can be fuzzed by its name alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from support.fuzz_messages import MessageSource, mutated_fields

Good = Callable[[Random], Message]
Sequence = Callable[[Random], list[Message]]
_AT_ONCE = 6
_UNARY_S = 20.0  # nothing asked once may take longer, on however busy a machine
# gRPC itself speaks without an ErrorInfo in these cases, and then says one of these things.
_OWN_STATUSES = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED}
# What grpc's client makes of a stream that the server ends while a request is being written: no status of the server's.
_WRITE_FAILED = "Internal error from Core"
# A process that was told to go. That it was, and did not just go, is for the check to see.
_NOBODY_THERE = ("Socket closed", "failed to connect", "Cancelling all calls", "Connection reset", "Broken pipe")
_NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


@dataclass(frozen=True)
class Method:
    """One method, and messages for it."""

    path: str
    takes_stream: bool
    gives_stream: bool
    source: MessageSource
    bare: frozenset[grpc.StatusCode]  # statuses without an ErrorInfo


@dataclass
class Case:
    """One call: all of it follows from seed, door and number."""

    number: int
    method: Method
    messages: list[bytes]
    timeout_s: float
    cancel_after: int | None  # responses
    outcome: str = "no answer"

    def __repr__(self) -> str:
        said = "\n    ".join(self.method.source.shown(one) for one in self.messages)
        return f"case {self.number} {self.method.path}: {self.outcome}\n    {said}"


@dataclass
class Fuzzed:
    """What came of it."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    num_cases: int = 0


def seed_and_seconds() -> tuple[int, float]:
    """What the environment asks for: a fixed short run, unless it says otherwise."""
    seconds = float(os.environ.get("MANIPLE_FUZZ_SECONDS", "10"))
    drawn = "1" if seconds <= 10 else str(Random().randrange(2**32))
    return int(os.environ.get("MANIPLE_FUZZ_SEED", drawn)), seconds


class Door:
    """A service of a running server."""

    def __init__(
        self,
        service: str,
        pool: DescriptorPool,
        *,
        good: Mapping[str, Iterable[Good]] | None = None,
        sequences: Mapping[str, Sequence] | None = None,
        rarely: Mapping[str, float] | None = None,
        bare: Iterable[grpc.StatusCode] = (),
    ) -> None:
        """Learn what the service has.

        Args:
            service: its full name.
            pool: where it is described, such as ``reflected(address)``.
            good: for a method's name, makers of messages that it takes; mutations start there.
            sequences: for a method that takes a stream, a maker of a whole one in good order.
            bare: statuses that it gives without an ErrorInfo, since somebody else's contract says so.
            rarely: how often a method is called, where that is to be less than others, which have 1.
        """
        self.service = service
        descriptors: list[MethodDescriptor] = list(pool.FindServiceByName(service).methods)
        kinds = {one.input_type.full_name: GetMessageClass(one.input_type) for one in descriptors}
        may_be_bare = frozenset({*_OWN_STATUSES, *bare})
        self._methods = [
            Method(
                f"/{service}/{one.name}",
                one.client_streaming,
                one.server_streaming,
                MessageSource(
                    kinds[one.input_type.full_name],
                    [_as(kinds[one.input_type.full_name], maker) for maker in (good or {}).get(one.name, ())],
                ),
                may_be_bare,
            )
            for one in descriptors
        ]
        self._sequences = {f"/{service}/{name}": maker for name, maker in (sequences or {}).items()}
        self._weights = [(rarely or {}).get(one.name, 1.0) for one in descriptors]

    def case(self, seed: int, number: int) -> Case:
        rng = Random(f"{seed} {self.service} {number}")
        (method,) = rng.choices(self._methods, self._weights)
        timeout_s = rng.choice((0.02, 0.2, 1.0)) if method.gives_stream or method.takes_stream else _UNARY_S
        cancel_after = rng.choice((None, None, 0, 1, 3)) if method.gives_stream else None
        return Case(number, method, self._messages(rng, method), timeout_s, cancel_after)

    def _messages(self, rng: Random, method: Method) -> list[bytes]:
        if not method.takes_stream:
            return [method.source.draw(rng)]
        if method.path not in self._sequences or rng.random() < 0.3:
            return [method.source.draw(rng) for _ in range(rng.choice((0, 1, 1, 2, 3, 6)))]
        return _disordered(rng, self._sequences[method.path](rng), method.source)


def _disordered(rng: Random, messages: list[Message], source: MessageSource) -> list[bytes]:
    """Return a stream that is almost in order."""
    for _ in range(rng.choice((0, 1, 1, 2))):
        place = rng.randrange(len(messages))
        match rng.randrange(5):
            case 0 if len(messages) > 1:
                del messages[place]
            case 1:
                messages.insert(rng.randrange(len(messages) + 1), messages[place])
            case 2:
                other = rng.randrange(len(messages))
                messages[place], messages[other] = messages[other], messages[place]
            case _:
                mutated_fields(rng, messages[place])
    wires = [message.SerializeToString() for message in messages]
    if rng.random() < 0.3:
        wires[rng.randrange(len(wires))] = source.draw(rng)
    return wires


def reflected(channel: grpc.Channel) -> tuple[DescriptorPool, set[str]]:
    """Ask a server what it serves: where that is described, and the names."""
    database = ProtoReflectionDescriptorDatabase(channel)
    return DescriptorPool(database), set(database.get_services())


def _as(kind: type[Message], maker: Good) -> Good:
    """Have a message of the generated class as one of the class that reflection gave."""
    return lambda rng: kind.FromString(maker(rng).SerializeToString())


async def fuzz(
    door: Door,
    address: Callable[[], str],
    *,
    seed: int,
    seconds: float,
    check: Callable[[], Awaitable[None]],
    after: Callable[[Case], Awaitable[None]] | None = None,
) -> Fuzzed:
    """Make calls for so long. Fails with the case that broke the rules, and with what repeats it.

    Args:
        door: what is called.
        address: where the server is now.
        seed: of all cases.
        seconds: for how long.
        check: that the server is well; called every few cases.
        after: puts right what a call that succeeded was meant to change.
    """
    fuzzed = Fuzzed(seed)
    end = time.monotonic() + seconds
    only = os.environ.get("MANIPLE_FUZZ_CASE")
    numbers = iter([int(only)]) if only else iter(range(10**9))
    print(f"\n{door.service}: MANIPLE_FUZZ_SEED={seed}", end="", flush=True)
    while time.monotonic() < end:
        batch = [door.case(seed, number) for _, number in zip(range(_AT_ONCE), numbers, strict=False)]
        if not batch:
            break
        async with grpc.aio.insecure_channel(address(), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            await asyncio.gather(*(_call(channel, case) for case in batch))
        for case in batch:
            fuzzed.outcomes[case.outcome.split(":")[0]] += 1
            fuzzed.num_cases += 1
            if after is not None:
                await after(case)
        try:
            await check()
        except Exception as error:
            why = f"{type(error).__name__} {error}"
            raise AssertionError(_story(door, seed, batch, f"afterwards the server is not well: {why}")) from error
        if broken := [case for case in batch if case.outcome.startswith("BROKEN")]:
            raise AssertionError(_story(door, seed, broken, "a call broke the rules"))
    print(f" {fuzzed.num_cases} cases, {dict(fuzzed.outcomes.most_common())}", flush=True)
    return fuzzed


def _story(door: Door, seed: int, cases: list[Case], what: str) -> str:
    again = f"MANIPLE_FUZZ_SEED={seed} MANIPLE_FUZZ_CASE={cases[0].number}"
    return "\n".join([f"{door.service}: {what}; to repeat it: {again}", *map(repr, cases)])


async def _call(channel: grpc.aio.Channel, case: Case) -> None:
    """Make one call, with bytes as they are, and put down how it ended."""
    kind = ("stream" if case.method.takes_stream else "unary", "stream" if case.method.gives_stream else "unary")
    make: Any = getattr(channel, "_".join(kind))(case.method.path)
    began = time.monotonic()
    try:
        call = make(_each(case.messages) if case.method.takes_stream else case.messages[0], timeout=case.timeout_s)
        if not case.method.gives_stream:
            await call
            case.outcome = "OK"
            return
        count = 0
        while await call.read() is not grpc.aio.EOF:
            count += 1
            if case.cancel_after is not None and count > case.cancel_after:
                call.cancel()
                case.outcome = "cancelled by us"
                return
        case.outcome = "OK"
    except asyncio.CancelledError:
        case.outcome = "cancelled by us"
    except grpc.aio.AioRpcError as error:
        case.outcome = _outcome(case, error, time.monotonic() - began)


async def _each(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def _outcome(case: Case, error: grpc.aio.AioRpcError, took_s: float) -> str:
    """Name the status; BROKEN and why, where no server of ours may answer so."""
    code, said = error.code(), error.details() or ""
    if case.method.takes_stream and said == _WRITE_FAILED and not error.trailing_metadata():
        return "ended before we had said everything"
    if code in _NEVER:
        return f"BROKEN: {code.name} {said[:500]}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and case.timeout_s == _UNARY_S:
        return f"BROKEN: no answer within {took_s:.1f} s"
    trailers = dict(error.trailing_metadata() or ())
    details = trailers.get("grpc-status-details-bin")
    if details is None:
        own = code in case.method.bare or any(words in said for words in _NOBODY_THERE)
        return f"{code.name}: {said[:200]}" if own else f"BROKEN: {code.name} has no ErrorInfo: {said[:300]}"
    if len(details) > 4096:
        return f"BROKEN: {code.name} has {len(details)} bytes of details"
    for detail in status_pb2.Status.FromString(details).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == "maniple.dev" and info.reason:
            return f"{code.name} {info.reason}: {said[:200]}"
    return f"BROKEN: {code.name} has no reason of the table: {said[:300]}"
