"""Answer probes of an orchestrator: ``grpc.health.v1`` in plaintext, on a port of its own, on threads of its own.

kubelet and its kind speak no TLS and show no certificate. All they learn is SERVING or NOT_SERVING.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from maniple.v1 import worker_pb2
from service_chassis.server import bind, server_options
from worker_service.heartbeat import Vitals

WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_MAX_THREADS = 4  # a probe takes one for a moment
_MAX_MESSAGE_BYTES = 4096


class ProbeServer:
    """The empty name is liveness: the process answers. That of WorkerService says whether this rank has failed."""

    def __init__(self, vitals: Vitals) -> None:
        pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="probe")
        self._server = grpc.server(pool, options=server_options(_MAX_MESSAGE_BYTES, max_concurrent_streams=16))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(vitals), self._server)

    def start(self, address: str) -> str:
        """Bind and serve; return the address with its port. Raises ``ConfigurationError``."""
        bound = bind(self._server, address, "probe_listen")
        self._server.start()
        return bound

    def stop(self) -> None:
        """End it."""
        self._server.stop(grace=0).wait(1.0)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped stubs
    """Probes check; a watch, which would hold a thread, is left unimplemented."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals

    def Check(self, request: HealthCheckRequest, context: grpc.ServicerContext) -> HealthCheckResponse:
        if request.service not in ("", WORKER_SERVICE):
            context.abort(grpc.StatusCode.NOT_FOUND, f"service={request.service[:120]!r}: is not served here")
        has_failed = bool(request.service) and self._vitals.failure is not None
        return HealthCheckResponse(
            status=HealthCheckResponse.NOT_SERVING if has_failed else HealthCheckResponse.SERVING
        )
