"""Keep one rank's Steps stream going (PROTOCOL A): hello, deltas in order, heartbeats, and again after a break.

A broken stream is no verdict. It is opened again with a small back-off; the rank says what it has accepted, the same
bytes are sent from there on, and it resends the results that were not read. Whether a rank that cannot be reached is
lost is the watchdog's business.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from control_plane.executors.base import StepsConnection
from control_plane.group.rank_clock import RankClock, StepTiming
from control_plane.group.step_ledger import StepLedger
from maniple.v1 import rank_health_pb2, scheduler_delta_pb2, worker_pb2
from service_chassis.errors import ManipleError, OutOfOrder
from service_chassis.ids import Epoch, Rank
from service_chassis.telemetry import get_logger

log = get_logger()

_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 0.5
# How long a rank may take to say why it ended a stream, after writing to it failed.
_STATUS_WAIT_S = 1.0


class StreamListener(Protocol):
    """Who is told what a rank says. Called from the event loop, in the order of the stream."""

    def on_welcome(self, rank: Rank, welcome: worker_pb2.StepsResponse.Welcome) -> None:
        """A stream is open."""

    def on_step_result(self, rank: Rank, result: scheduler_delta_pb2.StepResult) -> None:
        """A result came, perhaps one that came before."""

    def on_stream_report(self, rank: Rank, report: rank_health_pb2.RankReport) -> None:
        """The rank said how it is."""

    def on_refused(self, rank: Rank, error: ManipleError) -> None:
        """The rank ended the stream with a status that no reconnect can help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTiming:
    """Seconds; see GroupSettings."""

    report_interval_s: float
    idle_report_interval_s: float
    answer_timeout_s: float


class RankStream:
    """The stream to one rank over all its connections. Runs inside ``run``; everything else only queues."""

    def __init__(
        self,
        rank: Rank,
        open_connection: Callable[[], Awaitable[StepsConnection]],
        ledger: StepLedger,
        listener: StreamListener,
        *,
        epoch: Epoch,
        owner_id: str,
        timing: StreamTiming,
        sends_deltas: bool = True,
        on_timing: Callable[[Rank, StepTiming], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            rank: to talk to.
            open_connection: opens one.
            ledger: of all ranks.
            listener: told what the rank says.
            epoch: granted.
            owner_id: it was granted to.
            timing: of heartbeats.
            sends_deltas: False: they reach the rank another way, on which none is lost.
            on_timing: told when each step was where; None: the rank is not asked.
        """
        self.rank = rank
        self.connected = False
        self.num_connections = 0
        self._open_connection = open_connection
        self._ledger = ledger  # shared by all ranks; written by the group alone
        self._listener = listener
        self._epoch = epoch
        self._owner_id = owner_id
        self._timing = timing
        self._sends_deltas = sends_deltas
        self._on_timing = on_timing
        self._clock = RankClock()  # of the rank, as the present stream showed
        self._next_step = 0  # the next delta to write on the present connection
        self._extra: deque[worker_pb2.StepsRequest] = deque()  # unnumbered messages, behind the deltas
        self._goodbye: worker_pb2.StepsRequest | None = None
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()

    def wake(self) -> None:
        """Say that the ledger has a new delta."""
        self._wake.set()

    def send_sample_input(self, message: worker_pb2.StepsRequest) -> None:
        """Queue a message that has no step; the ledger keeps it for a reconnect."""
        if self.connected:  # else the next Welcome queues it
            self._extra.append(message)
            self._wake.set()

    async def goodbye(self, kind: worker_pb2.StepsRequest.Goodbye.Kind.ValueType, *, timeout_s: float) -> bool:
        """Send the last message and wait for the rank to end the stream; say whether it did."""
        goodbye = worker_pb2.StepsRequest.Goodbye(kind=kind)
        self._goodbye = worker_pb2.StepsRequest(epoch=self._epoch, goodbye=goodbye)
        self._wake.set()
        if not self.connected:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Serve streams, one after another, until the rank refuses for good or a goodbye ended one."""
        retry_s = _FIRST_RETRY_S
        try:
            while True:
                before = self.num_connections
                try:
                    await self._serve_one()
                    reason = "the rank closed the stream"
                except (ConnectionError, TimeoutError) as error:
                    reason = str(error) or type(error).__name__
                except OutOfOrder as error:  # it keeps what it accepted, and the next Welcome says where to go on
                    reason = error.message
                except ManipleError as error:
                    self._listener.on_refused(self.rank, error)
                    return
                if self._goodbye is not None:
                    return
                retry_s = _FIRST_RETRY_S if self.num_connections > before else min(2 * retry_s, _LAST_RETRY_S)
                log.warning("steps_stream.broken", rank=self.rank, reason=reason, retry_in_s=retry_s)
                await asyncio.sleep(retry_s)
        finally:
            self._ended.set()

    async def _serve_one(self) -> None:
        """Serve one connection until it ends; return if the rank closed it in order."""
        async with asyncio.timeout(self._timing.answer_timeout_s):
            connection = await self._open_connection()
        try:
            async with asyncio.timeout(self._timing.answer_timeout_s):
                hello = worker_pb2.StepsRequest.Hello(
                    owner_id=self._owner_id,
                    last_result_step=self._ledger.last_result,
                    wants_timings=self._on_timing is not None,
                )
                asked_ns = time.monotonic_ns()
                await connection.write(worker_pb2.StepsRequest(epoch=self._epoch, hello=hello))
                first = await connection.read()
            if first is None or first.WhichOneof("message") != "welcome":
                raise ConnectionError("the rank did not answer Hello with Welcome")
            self._clock = RankClock.seen(first.welcome.clock_ns, asked_ns=asked_ns, answered_ns=time.monotonic_ns())
            self._begin(first.welcome)
            await self._exchange(connection)
        finally:
            self.connected = False
            await connection.close()

    def _begin(self, welcome: worker_pb2.StepsResponse.Welcome) -> None:
        self._listener.on_welcome(self.rank, welcome)
        self._next_step = welcome.accepted + 1
        self._extra = deque(self._ledger.sample_inputs_above(welcome.completed))
        self._wake.set()
        self.connected = True
        self.num_connections += 1
        log.info(
            "steps_stream.opened",
            rank=self.rank,
            epoch=self._epoch,
            accepted=welcome.accepted,
            completed=welcome.completed,
            resent=self._ledger.last_sent - welcome.accepted,
        )

    async def _exchange(self, connection: StepsConnection) -> None:
        reader = asyncio.create_task(self._read_all(connection))
        writer = asyncio.create_task(self._write_all(connection))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not reader.done():
                # The goodbye was the last word, or the stream broke: in both cases the reader learns how it ended.
                await asyncio.wait({reader}, timeout=_STATUS_WAIT_S)
        finally:
            writer.cancel()
            reader.cancel()
            outcomes = await asyncio.gather(reader, writer, return_exceptions=True)
        for outcome in outcomes:  # the reader's first: it knows the status
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    async def _read_all(self, connection: StepsConnection) -> None:
        while (message := await connection.read()) is not None:
            which = message.WhichOneof("message")
            if which == "result":
                self._listener.on_step_result(self.rank, message.result)
            elif which == "report":
                self._listener.on_stream_report(self.rank, message.report)
            elif which == "timing" and self._on_timing is not None:
                self._on_timing(self.rank, self._clock.here(message.timing))

    async def _write_all(self, connection: StepsConnection) -> None:
        """Write what is due, and a heartbeat whenever nothing was for an interval."""
        heartbeat = worker_pb2.StepsRequest(epoch=self._epoch, heartbeat=worker_pb2.StepsRequest.Heartbeat())
        while True:
            message = self._next_message()
            if message is None:
                self._wake.clear()
                busy = self._ledger.oldest is not None
                interval_s = self._timing.report_interval_s if busy else self._timing.idle_report_interval_s
                try:
                    async with asyncio.timeout(interval_s):
                        await self._wake.wait()
                    continue
                except TimeoutError:
                    message = heartbeat
            await connection.write(message)
            if message is self._goodbye:
                return

    def _next_message(self) -> worker_pb2.StepsRequest | None:
        delta = self._ledger.message(self._next_step) if self._sends_deltas else None
        if delta is not None:
            self._next_step += 1
            return delta
        return self._extra.popleft() if self._extra else self._goodbye
