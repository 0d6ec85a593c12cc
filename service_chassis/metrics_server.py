"""Serve metrics to Prometheus over HTTP, on threads of their own.

What is measured belongs to an event loop: a scrape asks it for all readings of one moment, so that they agree with each
other. A loop that does not answer in time fails the scrape, which is how its hanging is seen from outside.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from service_chassis.errors import ConfigurationError
from service_chassis.metrics import COUNTER, Metric, Reading, Spread
from service_chassis.server import check_free
from service_chassis.telemetry import get_logger

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

log = get_logger()

MISSING = "needs prometheus-client: pip install 'maniple[observability]'"
# Prometheus gives up after 10 s by default.
_ANSWER_WITHIN_S = 5.0
# A connection that says nothing holds a thread no longer than this.
_SILENCE_S = 10.0


def is_installed() -> bool:
    """Whether metrics can be served here."""
    return importlib.util.find_spec("prometheus_client") is not None


def metrics_address_rule(value: str) -> str:
    """Check where metrics are to be served; nothing is nowhere."""
    if not value:
        return ""
    host, _, port = value.rpartition(":")
    fits = host and not host.startswith("unix") and port.isascii() and port.isdecimal() and len(port) <= 5
    return "" if fits and int(port) <= 65535 else "must be HOST:PORT with a port up to 65535 (0: a free one)"


class MetricsServer:
    """One HTTP server. ``read`` is called on ``loop`` for each scrape, and must not wait for anything."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        read: Callable[[], list[Reading]],
        loop: asyncio.AbstractEventLoop,
        address: str,
    ) -> None:
        """Bind ``address`` and serve.

        Raises:
            ConfigurationError: the address cannot be bound.
        """
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        check_free(address, "metrics_listen")
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Readings(metrics, read, loop))
        host, _, port = address.rpartition(":")
        made = type("_Server", (_Server,), {"address_family": _family(host.strip("[]"), int(port))})
        try:
            self._server: WSGIServer = make_server(host.strip("[]"), int(port), make_wsgi_app(registry), made, _Handler)
        except OSError as error:
            fault = ("metrics_listen", address, f"cannot be bound: {error.strerror or error}")
            raise ConfigurationError([fault]) from error
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True).start()
        log.info("metrics.listening", address=self.address)

    def stop(self) -> None:
        """End it; waits for a moment at most."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind, without asking a name server who we are."""
        super(WSGIServer, self).server_bind()
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hung up is nobody's to look at; what failed in answering it was told by WSGI."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: object) -> None:
        """Keep silent: a line a scrape is of use to nobody."""


def _family(host: str, port: int) -> int:
    import socket

    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0][0]


class _Readings:
    """What a registry asks. Any thread."""

    def __init__(
        self, metrics: Mapping[str, Metric], read: Callable[[], list[Reading]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._metrics = metrics
        self._read = read
        self._loop = loop

    def collect(self) -> Iterator[Family]:
        async def read() -> list[Reading]:
            return self._read()

        work = read()
        try:
            asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise
        try:
            readings = asked.result(_ANSWER_WITHIN_S)
        except TimeoutError:
            asked.cancel()
            raise
        yield from families(self._metrics, readings)


def families(metrics: Mapping[str, Metric], readings: list[Reading]) -> Iterator[Family]:
    """Sort readings by metric, in the form of prometheus_client; a metric without any is left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    grouped: dict[str, list[Reading]] = {}
    for reading in readings:
        grouped.setdefault(reading.name, []).append(reading)
    for name, metric in metrics.items():
        if name not in grouped:
            continue
        if metric.buckets:
            histogram = HistogramMetricFamily(name, metric.text, labels=metric.labels)
            bounds = [*map(str, metric.buckets), "+Inf"]
            for reading in grouped[name]:
                assert isinstance(reading.value, Spread)
                buckets = list(zip(bounds, map(float, reading.value.cumulative), strict=True))
                histogram.add_metric(reading.labels, buckets, reading.value.sum)
            yield histogram
            continue
        is_counter = metric.kind == COUNTER
        plain = (CounterMetricFamily if is_counter else GaugeMetricFamily)(name, metric.text, labels=metric.labels)
        for reading in grouped[name]:
            assert not isinstance(reading.value, Spread)
            plain.add_metric(reading.labels, reading.value)
        yield plain
