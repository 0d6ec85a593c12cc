"""Run one rank as a process: its two servers, its signals, its parent, its end."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from service_chassis.auth import PeerNamesInterceptor
from service_chassis.metrics_server import MetricsServer
from service_chassis.server import bind, make_server
from service_chassis.telemetry import get_logger
from service_chassis.tls import server_tls
from worker_service.config import TLS_FIELDS, WorkerConfig
from worker_service.heartbeat import HealthServer
from worker_service.metrics import METRICS
from worker_service.probe import ProbeServer
from worker_service.rank import Rank
from worker_service.servicer import worker_service_handler

# A rank that was told to go is gone within this time, also when its device hangs in a collective or Python is stuck.
_EXIT_WITHIN_S = 1
# The call that lets a rank go gets its answer before everything ends.
_ANSWER_S = 0.05
_PARENT_DIED = 71


def watch_parent(parent_fd: int, addresses: Sequence[str]) -> None:
    """End this process at once when the other end of the pipe closes: nobody is left who could want anything.

    Sockets among ``addresses`` are removed, and their directory with the last of them: a killed parent could not.

    A pipe and not PDEATHSIG, which follows the thread that forked. On a thread of its own, so that neither the event
    loop nor a step delays it.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(parent_fd, 1):
                pass
        for path in (Path(address.removeprefix("unix:")) for address in addresses if address.startswith("unix:")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                path.parent.rmdir()  # refused while another rank's sockets are in it
        os._exit(_PARENT_DIED)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def advertised(health_address: str, *, beside: str) -> str:
    """Return what ``Describe`` says of the health server: only its port where both are TCP.

    An owner elsewhere knows by which name it reached this host; 0.0.0.0 or a name of ours may mean nothing to it.
    """
    if "unix:" in (health_address[:5], beside[:5]):
        return health_address
    return ":" + health_address.rpartition(":")[2]


async def run_worker(config: WorkerConfig) -> int:
    """Serve one rank until its owner, its parent or a signal ends it. Returns the exit code.

    Raises:
        ConfigurationError: an address cannot be bound.
    """
    if config.parent_fd is not None:
        watch_parent(config.parent_fd, (config.listen, config.health_listen))
    gone = asyncio.Event()

    def go(reason: str) -> None:
        # A timer in C: it fires even if no Python code runs any more.
        faulthandler.dump_traceback_later(_EXIT_WITHIN_S, exit=True)
        gone.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, go, "SIGTERM")
    if config.parent_fd is None:
        loop.add_signal_handler(signal.SIGINT, go, "SIGINT")
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent, which ends us in order

    rank = Rank(config, request_exit=go)
    tls = server_tls(config.tls_files, TLS_FIELDS)
    client_names = frozenset(config.tls_client_names)
    server = make_server(
        config.max_step_message_bytes, interceptors=[PeerNamesInterceptor(client_names)] if client_names else []
    )
    health = HealthServer(
        rank.vitals,
        report_interval_s=config.report_interval_s,
        idle_report_interval_s=config.idle_report_interval_s,
        tls=tls,
        client_names=client_names,
    )
    probe = ProbeServer(rank.vitals) if config.probe_listen else None
    await rank.start()
    server.add_generic_rpc_handlers((worker_service_handler(rank),))
    address = bind(server, config.listen, tls=tls)
    rank.health_address = advertised(health.start(config.health_listen), beside=address)
    await server.start()
    if probe is not None:
        get_logger().info("probe.listening", address=probe.start(config.probe_listen))
    metrics = None
    if config.metrics_listen:
        metrics = MetricsServer(METRICS, rank.measure().read, loop, config.metrics_listen)
    if config.announce_fd is not None:
        facts = {"address": address, "health_address": rank.health_address, "pid": os.getpid()}
        with os.fdopen(config.announce_fd, "w") as pipe:
            pipe.write(json.dumps(facts) + "\n")
    get_logger().info("worker.listening", address=address, health_address=rank.health_address, pid=os.getpid())
    await gone.wait()
    get_logger().info("worker.stopping")
    await asyncio.sleep(_ANSWER_S)
    await server.stop(0)
    await rank.close()
    health.stop()
    if probe is not None:
        probe.stop()
    if metrics is not None:
        metrics.stop()
    return 0


def exit_now(code: int) -> None:
    """End the process without waiting for threads: the device thread may hang for good."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
