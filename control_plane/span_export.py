"""Send spans to a collector by OTLP over gRPC, off the event loop. The variables OTEL_* hold, but for the endpoint."""

from __future__ import annotations

import importlib.util
import re
import threading
from typing import TYPE_CHECKING

from service_chassis.telemetry import get_logger

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = get_logger()

MISSING = "needs OpenTelemetry's SDK: pip install 'maniple[observability]'"
# What the standard calls it; ours is MANIPLE_OTLP_ENDPOINT.
STANDARD_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
# At the end, for what is not sent yet.
_LAST_WORDS_S = 2.0


def is_installed() -> bool:
    """Whether spans can be sent from here."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc.trace_exporter") is not None
    except ModuleNotFoundError:  # a package above it
        return False


def endpoint_rule(value: str) -> str:
    """Check where spans are to be sent; nothing is nowhere."""
    fits = not value or re.fullmatch(r"https?://[^/\s:]+(:\d{1,5})?/?|https?://\[[0-9a-fA-F:]+\](:\d{1,5})?/?", value)
    return "" if fits else "must be http://HOST:PORT, or https:// for TLS, where a collector takes OTLP over gRPC"


class SpanExport:
    """The way of spans out of this process. They wait in a bounded queue, and the oldest that fit are sent."""

    def __init__(self, endpoint: str, *, version: str) -> None:
        """Begin; whether somebody answers at ``endpoint`` is found out by sending."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        ours = Resource({"service.name": "maniple-control-plane", "service.version": version})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self.tracer: Tracer = self._provider.get_tracer("maniple", version)
        log.info("spans.exported", endpoint=endpoint)

    def close(self) -> None:
        """Send what waits, as far as that is quick. Blocks."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_WORDS_S)
