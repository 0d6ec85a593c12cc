"""Find what the security flags of a control plane cannot mean together, before anything starts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from control_plane.executors.selection import RAY, REMOTE
from service_chassis.callers import JWT_ALGORITHMS
from service_chassis.server_address import is_private
from service_chassis.settings import Fault

if TYPE_CHECKING:
    from control_plane.config import ControlPlaneConfig


def knows_callers(config: ControlPlaneConfig) -> bool:
    """Whether callers can be told from each other."""
    return bool(config.auth_callers or config.auth_jwks or config.tls_client_ca)


def client_flags(config: ControlPlaneConfig) -> str:
    """Return what the command line of a client must say so that this server answers it."""
    flags = ["--tls-ca FILE"] if config.tls_certificate else []
    if config.tls_client_ca:
        flags.append("--tls-certificate FILE --tls-key FILE")
    elif config.auth_callers or config.auth_jwks:
        flags.append("--token-file FILE")
    return " ".join(flags)


def algorithms_rule(value: Sequence[str]) -> str:
    """Return what is wrong with the algorithms of tokens, or nothing."""
    if value and all(one in JWT_ALGORITHMS for one in value):
        return ""
    return f"must be some of {', '.join(JWT_ALGORITHMS)}: none and shared secrets are never accepted"


def security_faults(config: ControlPlaneConfig) -> list[Fault]:
    """Find what contradicts, or lacks its other half."""
    return [*_tls_faults(config), *_auth_faults(config), *_listen_faults(config), *_worker_faults(config)]


def _tls_faults(config: ControlPlaneConfig) -> list[Fault]:
    faults: list[Fault] = []
    if bool(config.tls_certificate) != bool(config.tls_key):
        missing = "tls_key" if config.tls_certificate else "tls_certificate"
        faults.append((missing, "", "must be given, too: certificate and key belong together"))
    if config.tls_client_ca and not config.tls_certificate:
        faults.append(("tls_client_ca", config.tls_client_ca, "needs --tls-certificate and --tls-key"))
    if config.tls_certificate and config.listen.startswith("unix:"):
        rule = f"is not used on a Unix socket, and --listen is {config.listen}"
        faults.append(("tls_certificate", config.tls_certificate, rule))
    if config.relay_tls_server_name and not (config.relay_tls_ca or config.tls_certificate):
        faults.append(("relay_tls_server_name", config.relay_tls_server_name, "needs --relay-tls-ca"))
    return faults


def _auth_faults(config: ControlPlaneConfig) -> list[Fault]:
    faults: list[Fault] = []
    of_jwt = {"auth_jwt_issuer": config.auth_jwt_issuer, "auth_jwt_audience": config.auth_jwt_audience}
    for name, value in of_jwt.items():
        if config.auth_jwks and not value:
            faults.append((name, value, "must be given with --auth-jwks: tokens for others are no good here"))
        elif value and not config.auth_jwks:
            faults.append((name, value, "needs --auth-jwks"))
    if not knows_callers(config):
        for name in ("max_requests_per_caller", "max_waiting_per_caller"):
            if value := getattr(config, name):
                rule = "needs --auth-callers, --auth-jwks or --tls-client-ca: else nobody is told from anybody else"
                faults.append((name, value, rule))
    return faults


def _listen_faults(config: ControlPlaneConfig) -> list[Fault]:
    faults: list[Fault] = []
    taken = {config.listen}
    for name in ("admin_listen", "probe_listen"):
        address: str = getattr(config, name)
        if address and address in taken and not address.endswith(":0"):
            faults.append((name, address, "must be an address of its own"))
        taken.add(address)
    if config.admin_listen and not is_private(config.admin_listen) and not (config.auth_callers or config.auth_jwks):
        rule = "must be unix:PATH or a port of the loopback, or needs --auth-callers or --auth-jwks"
        faults.append(("admin_listen", config.admin_listen, rule))
    return faults


def _worker_faults(config: ControlPlaneConfig) -> list[Fault]:
    given = {name: getattr(config, name) for name in ("rank_tls_ca", "rank_tls_certificate", "rank_tls_key")}
    if any(given.values()):
        rule = "must be given, too: workers show a certificate and ask for one"
        return [(name, value, rule) for name, value in given.items() if not value]
    if config.rank_tls_server_name:
        return [("rank_tls_server_name", config.rank_tls_server_name, "needs --rank-tls-ca")]
    return []


def plaintext_faults(config: ControlPlaneConfig, executor: str) -> list[Fault]:
    """Refuse to send prompts to workers over a network in plaintext, unless it is allowed."""
    if config.rank_tls_ca or config.allow_plaintext_workers:
        return []
    instead = "needs --rank-tls-ca, --rank-tls-certificate and --rank-tls-key"
    unless = "or --allow-plaintext-workers on a network that encrypts and admits nobody else"
    if executor == RAY:
        rule = f"has ranks listen where others can connect: {instead}, with MANIPLE_WORKER_TLS_* on its nodes, {unless}"
        return [("executor", executor, rule)]
    addresses = [address for group in config.worker_addresses for address in group]
    if executor == REMOTE and (open_one := next((one for one in addresses if not is_private(one)), "")):
        rule = f"sends prompts over a network to {open_one}: {instead}, {unless}"
        return [("worker_addresses", config.worker_addresses, rule)]
    return []
