"""Run a real Envoy between two ends of ours, with the settings that meshes and operators give it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from support.certificates import Identity
from support.platform_tools import envoy
from support.waiting import until

Config = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
_TYPE = "type.googleapis.com/envoy.extensions"
ROUTER: Config = {
    "name": "envoy.filters.http.router",
    "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"},
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where calls go on to, and how Envoy holds the connections there."""

    addresses: Sequence[str]  # HOST:PORT, or unix:PATH
    name: str = "upstream"
    max_requests: int = 0  # the circuit breaker; 0: Envoy's default of 1024
    max_concurrent_streams: int = 0  # on one connection to the upstream
    keepalive_s: float = 0.0  # HTTP/2 pings to the upstream
    health_service: str = ""  # checked by grpc.health.v1
    health_port: int = 0  # where, if not at the addresses themselves
    panic_threshold: float | None = None  # percent; Envoy's default is 50
    tls: Config | None = None

    def build(self) -> Config:
        h2: Config = {}
        if self.max_concurrent_streams:
            h2["max_concurrent_streams"] = self.max_concurrent_streams
        if self.keepalive_s:
            h2["connection_keepalive"] = {"interval": f"{self.keepalive_s}s", "timeout": "5s"}
        made: Config = {
            "name": self.name,
            "type": "STATIC",
            "connect_timeout": "2s",
            "lb_policy": "ROUND_ROBIN",
            "typed_extension_protocol_options": {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
                    "explicit_http_config": {"http2_protocol_options": h2},
                }
            },
            "load_assignment": {
                "cluster_name": self.name,
                "endpoints": [{"lb_endpoints": [{"endpoint": self._endpoint(one)} for one in self.addresses]}],
            },
        }
        if self.max_requests:
            made["circuit_breakers"] = {"thresholds": [{"max_requests": self.max_requests}]}
        if self.health_service:
            made["health_checks"] = [
                {
                    "timeout": "1s",
                    "interval": "0.1s",
                    "no_traffic_interval": "0.1s",
                    "unhealthy_threshold": 1,
                    "healthy_threshold": 1,
                    "grpc_health_check": {"service_name": self.health_service},
                }
            ]
        if self.panic_threshold is not None:
            made["common_lb_config"] = {"healthy_panic_threshold": {"value": self.panic_threshold}}
        if self.tls is not None:
            made["transport_socket"] = self.tls
        return made

    def _endpoint(self, address: str) -> Config:
        elsewhere = {"health_check_config": {"port_value": self.health_port}} if self.health_port else {}
        return {"address": _address(address), **elsewhere}


@dataclass(frozen=True, kw_only=True)
class Door:
    """A listener, and what it lets calls do."""

    cluster: str = "upstream"
    name: str = "door"
    address: str = "127.0.0.1:0"
    route_timeout_s: float | None = None  # None: Envoy's default of 15 s
    stream_idle_timeout_s: float | None = None  # None: Envoy's default of 300 s
    retry_on: str = ""
    num_retries: int = 2
    max_concurrent_streams: int = 0  # of a client's connection
    max_connection_duration_s: float = 0.0
    filters: Sequence[Config] = field(default_factory=tuple)  # before the router
    cors: bool = False
    tls: Config | None = None

    def build(self) -> Config:
        action: Config = {"cluster": self.cluster}
        if self.route_timeout_s is not None:
            action["timeout"] = f"{self.route_timeout_s}s"
        if self.retry_on:
            action["retry_policy"] = {"retry_on": self.retry_on, "num_retries": self.num_retries}
        host: Config = {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": action}]}
        if self.cors:
            host["typed_per_filter_config"] = {
                "envoy.filters.http.cors": {
                    "@type": f"{_TYPE}.filters.http.cors.v3.CorsPolicy",
                    "allow_origin_string_match": [{"prefix": ""}],
                    "allow_methods": "GET, PUT, DELETE, POST, OPTIONS",
                    "allow_headers": "content-type,x-grpc-web,x-user-agent,grpc-timeout,connect-protocol-version",
                    "expose_headers": "grpc-status,grpc-message,grpc-status-details-bin",
                }
            }
        manager: Config = {
            "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": self.name,
            "codec_type": "AUTO",
            "route_config": {"virtual_hosts": [host]},
            "http_filters": [*self.filters, ROUTER],
        }
        if self.stream_idle_timeout_s is not None:
            manager["stream_idle_timeout"] = f"{self.stream_idle_timeout_s}s"
        if self.max_concurrent_streams:
            manager["http2_protocol_options"] = {"max_concurrent_streams": self.max_concurrent_streams}
        if self.max_connection_duration_s:
            manager["common_http_protocol_options"] = {"max_connection_duration": f"{self.max_connection_duration_s}s"}
        chain: Config = {
            "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
        }
        if self.tls is not None:
            chain["transport_socket"] = self.tls
        return {"name": self.name, "address": _address(self.address), "filter_chains": [chain]}


def server_tls(identity: Identity, client: str) -> Config:
    """Show who one is, and let in only whom the authority calls ``client``: the near end of a mesh's mutual TLS."""
    return _tls("Downstream", _shown(identity, client), require_client_certificate=True)


def client_tls(identity: Identity, server: str) -> Config:
    """Show who one is, and talk only to whom the authority calls ``server``: the far end of a mesh's mutual TLS."""
    return _tls("Upstream", _shown(identity, server), sni=server)


def _shown(identity: Identity, other: str) -> Config:
    pair = {
        "certificate_chain": {"filename": identity.path("certificate")},
        "private_key": {"filename": identity.path("key")},
    }
    trusted = {
        "trusted_ca": {"filename": identity.path("ca")},
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": other}}],
    }
    return {"alpn_protocols": ["h2"], "tls_certificates": [pair], "validation_context": trusted}


def _tls(direction: str, common: Config, **more: object) -> Config:
    kind = f"{_TYPE}.transport_sockets.tls.v3.{direction}TlsContext"
    typed = {"@type": kind, "common_tls_context": common, **more}
    return {"name": "envoy.transport_sockets.tls", "typed_config": typed}


class Envoy:
    """A running Envoy."""

    def __init__(self, resources: Config, directory: Path) -> None:
        """Start it with listeners and clusters; relative paths in them are those of the repository."""
        config = {"admin": {"address": _address("127.0.0.1:0")}, "static_resources": resources}
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "envoy.json"
        path.write_text(json.dumps(config))
        self._admin_file = directory / "admin"
        self._admin_file.unlink(missing_ok=True)
        self._log = directory / "envoy.log"
        words = ["--concurrency", "1", "-l", "warning", "--disable-hot-restart", "--drain-time-s", "2"]
        words += ["--admin-address-path", str(self._admin_file), "--log-path", str(self._log)]
        tool = envoy()
        self._process = subprocess.Popen([str(tool.path), "-c", str(path), *words], env=dict(tool.env), cwd=ROOT)
        self._ports: dict[str, int] = {}

    async def start(self) -> None:
        await until(lambda: self._admin_address or self._process.poll() is not None, "Envoy starts")
        assert self._process.poll() is None, self.log()
        await until(self._is_listening, "Envoy listens")

    @property
    def _admin_address(self) -> str:
        return self._admin_file.read_text() if self._admin_file.exists() else ""

    def _is_listening(self) -> bool:
        told = json.loads(self.ask("/listeners?format=json"))
        self._ports = {
            one["name"]: one["local_address"]["socket_address"]["port_value"]
            for one in told.get("listener_statuses", [])
        }
        return bool(self._ports) and '"state": "LIVE"' in self.ask("/server_info")

    def address(self, door: str = "door") -> str:
        return f"127.0.0.1:{self._ports[door]}"

    def ask(self, path: str, *, post: bool = False) -> str:
        """Ask the administration."""
        request = urllib.request.Request(f"http://{self._admin_address}{path}", method="POST" if post else "GET")
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read().decode())

    def count(self, name: str) -> int:
        """A counter or gauge, such as cluster.upstream.upstream_rq_retry."""
        for line in self.ask(f"/stats?filter=^{name}$").splitlines():
            return int(line.rpartition(" ")[2])
        return 0

    def requests_by_address(self, cluster: str = "upstream") -> dict[str, int]:
        """How many requests each host of a cluster was sent."""
        told = json.loads(self.ask("/clusters?format=json"))
        [found] = [one for one in told["cluster_statuses"] if one["name"] == cluster]
        counts = {}
        for host in found["host_statuses"]:
            stats = {one["name"]: int(one.get("value", 0)) for one in host["stats"]}
            counts[_text(host["address"])] = stats["rq_total"]
        return counts

    def drain(self) -> None:
        """Tell clients to go on elsewhere, as before a pod's end."""
        self.ask("/drain_listeners?graceful", post=True)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
        self._process.wait(10)


@asynccontextmanager
async def envoys(
    directory: Path, *ends: tuple[Door | Sequence[Door], Cluster | Sequence[Cluster]] | Config
) -> AsyncIterator[list[Envoy]]:
    """Run one for each of ``ends``, or with such static resources, until the block ends."""
    running: list[Envoy] = []
    try:
        for index, end in enumerate(ends):
            resources = end if isinstance(end, dict) else _resources(*end)
            running.append(Envoy(resources, directory / f"envoy-{index}"))
        await asyncio.gather(*(one.start() for one in running))
        yield running
    finally:
        for one in running:
            one.end()


def recommended(*addresses: str) -> Config:
    """Return what docs/proxies/envoy.yaml has, before these servers and at a port of its own."""
    resources: Config = yaml.safe_load((ROOT / "docs/proxies/envoy.yaml").read_text())["static_resources"]
    resources["listeners"][0]["address"] = _address("127.0.0.1:0")
    [cluster] = resources["clusters"]
    endpoints = [{"endpoint": {"address": _address(one)}} for one in addresses]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    if any(one.startswith("unix:") for one in addresses):
        cluster["type"] = "STATIC"
    return resources


def _resources(doors: Door | Sequence[Door], clusters: Cluster | Sequence[Cluster]) -> Config:
    return {
        "listeners": [one.build() for one in ([doors] if isinstance(doors, Door) else doors)],
        "clusters": [one.build() for one in ([clusters] if isinstance(clusters, Cluster) else clusters)],
    }


def _text(address: Config) -> str:
    if "pipe" in address:
        return f"unix:{address['pipe']['path']}"
    place = address["socket_address"]
    return f"{place['address']}:{place['port_value']}"


def _address(text: str) -> Config:
    if text.startswith("unix:"):
        return {"pipe": {"path": text.removeprefix("unix:")}}
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
