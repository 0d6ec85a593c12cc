"""Say how this rank is: on ``Steps``, and on a health server with a thread of its own, answered also during a step.

``Vitals`` is what both read. Whoever owns a fact replaces it as one immutable value, so that any thread reads a fact
that was true at one moment, without a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from maniple.v1 import rank_health_pb2, rank_health_pb2_grpc
from service_chassis.auth import certificate_names
from service_chassis.server import bind, server_options
from service_chassis.tls import ServerTls

_MAX_WATCHERS = 16  # a thread each; a control plane needs one, a spare and people with a terminal the others


@dataclass(frozen=True, slots=True)
class Busy:
    """Long work besides steps."""

    what: str
    up_to_s: float  # longer is stuck
    since: float
    progress: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """What made the rank fail. It never recovers."""

    kind: str  # the exception's class
    message: str
    step: int  # 0 outside steps


def failure_of(error: Exception, *, step: int = 0, doing: str = "") -> Failure:
    """Describe an exception on one line."""
    text = " ".join(str(error).split()) or "no message"
    return Failure(type(error).__name__, f"{doing}: {text}" if doing else text, step)


class Vitals:
    """The facts of a RankReport, and who wants to hear of a change at once."""

    def __init__(self, incarnation_id: str) -> None:
        self.incarnation_id = incarnation_id
        self.epoch = 0  # event loop
        self.formation_id = ""  # event loop
        self.accepted = (0, 0)  # step, state digest after it; event loop
        self.completed = (0, 0)  # step, token digest after it (0: not known); event loop
        self.running = (0, 0.0)  # step, monotonic time it began, waits for the owner left out; device thread
        self.held_since = 0.0  # since when its clock stands still; 0: it runs; device thread
        self.busy: Busy | None = None  # event loop; its progress from the device thread
        self.failure: Failure | None = None  # event loop, once
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether a step is outstanding or long work is under way: reports are wanted more often."""
        return self.accepted[0] > self.completed[0] or self.running[0] > 0 or self.busy is not None

    def report(self, late_s: float = 0.0) -> rank_health_pb2.RankReport:
        """Return the report of this moment. Any thread."""
        now = time.monotonic()
        # In this order: a step read as completed was accepted before, so a reader never sees completed > accepted.
        completed, token_digest = self.completed
        # In this order: a clock seen running was moved on before by all that it stood still.
        held_since = self.held_since
        running_step, running_since = self.running
        accepted, state_digest = self.accepted
        report = rank_health_pb2.RankReport(
            incarnation_id=self.incarnation_id,
            epoch=self.epoch,
            accepted=accepted,
            completed=completed,
            running_step=running_step,
            running_for_ms=max(0, int(((held_since or now) - running_since) * 1000)) if running_step else 0,
            state_digest=state_digest,
            token_digest=token_digest,
            late_ms=max(0, int(late_s * 1000)),
            formation_id=self.formation_id,
        )
        if (busy := self.busy) is not None:
            report.busy.CopyFrom(
                rank_health_pb2.RankReport.Busy(
                    what=busy.what,
                    up_to_s=busy.up_to_s,
                    for_s=now - busy.since,
                    progress=busy.progress,
                    detail=busy.detail,
                )
            )
        if (failure := self.failure) is not None:
            report.failure.CopyFrom(
                rank_health_pb2.RankReport.Failure(kind=failure.kind, message=failure.message, step=failure.step)
            )
        return report

    def hold_clock(self) -> None:
        """Stop the clock of the running step: it waits for its owner. Device thread."""
        self.held_since = time.monotonic()

    def release_clock(self) -> None:
        """Let it go on from where it stood. Device thread."""
        step, since = self.running
        self.running = (step, since + time.monotonic() - self.held_since)
        self.held_since = 0.0

    @contextmanager
    def listening(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call ``callback``, from any thread, whenever something must be reported at once."""
        with self._lock:
            self._listeners.append(callback)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(callback)

    def announce(self) -> None:
        """Have everybody report at once: a failure, long work that begins or ends. Any thread."""
        with self._lock:
            listeners = list(self._listeners)
        for callback in listeners:
            callback()


class _Watch(rank_health_pb2_grpc.RankHealthServiceServicer):
    def __init__(
        self, vitals: Vitals, report_interval_s: float, idle_report_interval_s: float, client_names: frozenset[str]
    ) -> None:
        self._vitals = vitals
        self._client_names = client_names
        self._report_interval_s = report_interval_s
        self._idle_report_interval_s = idle_report_interval_s

    def Watch(
        self, request: rank_health_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[rank_health_pb2.WatchResponse]:
        if self._client_names and self._client_names.isdisjoint(certificate_names(context.auth_context())):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "the certificate's names are not in --tls-client-names")
        idle_s = request.idle_interval_ms / 1000 if request.idle_interval_ms else self._idle_report_interval_s
        wake = threading.Event()
        context.add_callback(wake.set)
        late_s = 0.0
        with self._vitals.listening(wake.set):
            while context.is_active():
                yield rank_health_pb2.WatchResponse(report=self._vitals.report(late_s))
                late_s = self._pause(wake, idle_s)

    def _pause(self, wake: threading.Event, idle_s: float) -> float:
        """Wait until a report is due; return the seconds by which this thread woke too late.

        Idleness is looked at in slices of the short interval, so that steps need not wake anybody when they begin: in
        lock step each of them would.
        """
        started = time.monotonic()
        while True:
            slice_s = min(self._report_interval_s, idle_s)
            due = time.monotonic() + slice_s
            if wake.wait(slice_s):
                wake.clear()
                return 0.0
            now = time.monotonic()
            if self._vitals.active or now - started >= idle_s:
                return now - due


class HealthServer:
    """RankHealthService on a connection and threads of its own, never behind a step or the event loop."""

    def __init__(
        self,
        vitals: Vitals,
        *,
        report_interval_s: float,
        idle_report_interval_s: float,
        tls: ServerTls | None = None,
        client_names: frozenset[str] = frozenset(),
    ) -> None:
        """Prepare; with ``client_names`` one of them must be in a client's certificate."""
        self._tls = tls
        pool = ThreadPoolExecutor(_MAX_WATCHERS, thread_name_prefix="rank-health")
        self._server = grpc.server(pool, options=server_options(max_message_bytes=1 << 20))
        servicer = _Watch(vitals, report_interval_s, idle_report_interval_s, client_names)
        rank_health_pb2_grpc.add_RankHealthServiceServicer_to_server(servicer, self._server)

    def start(self, address: str) -> str:
        """Bind and serve; return the address with its port. Raises ``ConfigurationError``."""
        bound = bind(self._server, address, "health_listen", tls=self._tls)
        self._server.start()
        return bound

    def stop(self) -> None:
        """End all watches."""
        self._server.stop(grace=0).wait(1.0)
