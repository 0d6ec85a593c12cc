"""Make of the security flags what servers and channels need: certificates, keys, callers, and who may call what."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from control_plane.config import ControlPlaneConfig
from control_plane.doors import admin
from control_plane.doors.method_scopes import SCOPES_OF_METHODS
from control_plane.security_rules import knows_callers
from service_chassis.auth import AccessPolicy, Authentication
from service_chassis.callers import ADMIN, INFERENCE, STATUS, read_callers
from service_chassis.channelz import CHANNELZ
from service_chassis.errors import ConfigurationError
from service_chassis.server_address import is_private
from service_chassis.telemetry import get_logger
from service_chassis.tls import ClientTls, ServerTls, TlsFiles, client_tls, server_tls
from service_chassis.watched_files import WatchedFiles

log = get_logger()

T = TypeVar("T")

_LEAST_TOKEN_CHARS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Of one control plane."""

    tls: ServerTls | None  # of the doors
    policy: AccessPolicy  # of the doors
    admin_policy: AccessPolicy  # of --admin-listen
    worker_tls: ClientTls | None  # to workers that run elsewhere
    relay_tls: ClientTls | None  # to other control planes
    relay_token: WatchedFiles[str] | None


def load_security(config: ControlPlaneConfig) -> Security:
    """Read every file.

    Raises:
        ConfigurationError: one of them is no good.
    """
    authentication = _authentication(config)
    fields = {"certificate": "tls_certificate", "key": "tls_key", "ca": "tls_client_ca"}
    own = TlsFiles(certificate=config.tls_certificate, key=config.tls_key, ca=config.tls_client_ca)
    if not authentication.is_configured and not is_private(config.listen):
        log.warning("server.open_to_all", address=config.listen, scopes=[INFERENCE])
    if (config.auth_callers or config.auth_jwks) and not config.tls_certificate and not is_private(config.listen):
        log.warning("server.tokens_in_plaintext", address=config.listen)
    return Security(
        tls=server_tls(own, fields),
        policy=door_policy(config, authentication),
        admin_policy=admin_policy(config, authentication),
        worker_tls=_worker_tls(config),
        relay_tls=_relay_tls(config),
        relay_token=_relay_token(config),
    )


def door_policy(config: ControlPlaneConfig, authentication: Authentication) -> AccessPolicy:
    """Return who may call what at --listen."""
    flags = "--auth-callers or --auth-jwks"
    not_here: dict[str, str] = {}
    anonymous = {INFERENCE}
    if config.admin_listen:
        not_here |= dict.fromkeys((admin.SERVICE, CHANNELZ), f"is served at --admin-listen, {config.admin_listen}")
        closed = f"callers are not told from each other here; give {flags}"
    elif is_private(config.listen):
        anonymous |= {STATUS, ADMIN}
        closed = ""
    else:
        where = f"--listen {config.listen} can be reached by others and authenticates nobody"
        closed = f"{where}; give {flags}, or --admin-listen"
    return AccessPolicy(
        scopes_of_methods=SCOPES_OF_METHODS,
        authentication=authentication,
        anonymous_scopes=frozenset(anonymous),
        closed=closed,
        not_here=not_here,
    )


def admin_policy(config: ControlPlaneConfig, authentication: Authentication) -> AccessPolicy:
    """Return who may call what at --admin-listen."""
    if is_private(config.admin_listen):  # in plaintext, so that nobody shows a certificate
        authentication = replace(authentication, certificates=False)
    return AccessPolicy(
        scopes_of_methods=SCOPES_OF_METHODS,
        authentication=authentication,
        anonymous_scopes=frozenset({STATUS, ADMIN}),
        closed="it is served at --listen",
    )


def _worker_tls(config: ControlPlaneConfig) -> ClientTls | None:
    if not config.rank_tls_ca:
        return None
    files = TlsFiles(certificate=config.rank_tls_certificate, key=config.rank_tls_key, ca=config.rank_tls_ca)
    fields = {"certificate": "rank_tls_certificate", "key": "rank_tls_key", "ca": "rank_tls_ca"}
    return client_tls(files, fields, server_name=config.rank_tls_server_name)


def _relay_tls(config: ControlPlaneConfig) -> ClientTls | None:
    if not config.tls_certificate and not config.relay_tls_ca:
        return None
    ca, field = config.relay_tls_ca, "relay_tls_ca"
    if not ca:
        ca, field = config.tls_client_ca, "tls_client_ca"
    files = TlsFiles(certificate=config.tls_certificate, key=config.tls_key, ca=ca)
    fields = {"certificate": "tls_certificate", "key": "tls_key", "ca": field}
    return client_tls(files, fields, server_name=config.relay_tls_server_name)


def _relay_token(config: ControlPlaneConfig) -> WatchedFiles[str] | None:
    path = config.relay_token
    if not path:
        return None

    def read() -> str:
        token = Path(path).read_text(encoding="ascii").strip()
        if len(token) < _LEAST_TOKEN_CHARS or not token.isprintable() or " " in token:
            raise ValueError(f"must hold one token of at least {_LEAST_TOKEN_CHARS} characters")
        return token

    return _watched("relay_token", path, lambda: WatchedFiles((path,), read, what="the token for other control planes"))


def _authentication(config: ControlPlaneConfig) -> Authentication:
    callers = jwt = None
    if path := config.auth_callers:
        callers = _watched(
            "auth_callers", path, lambda: WatchedFiles((path,), lambda: read_callers(path), what="callers")
        )
    if keys := config.auth_jwks:
        if importlib.util.find_spec("jwt") is None:
            raise ConfigurationError([("auth_jwks", keys, "needs PyJWT: pip install 'maniple[auth]'")])
        from service_chassis.jwt_verifier import JwtRules, JwtVerifier

        rules = JwtRules(
            issuer=config.auth_jwt_issuer,
            audience=config.auth_jwt_audience,
            algorithms=config.auth_jwt_algorithms,
        )
        jwt = _watched("auth_jwks", keys, lambda: JwtVerifier(keys, rules))
    made = Authentication(callers=callers, jwt=jwt, certificates=bool(config.tls_client_ca))
    assert made.is_configured == knows_callers(config)
    return made


def _watched(field: str, path: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except OSError as error:
        raise ConfigurationError([(field, path, f"cannot be read: {error.strerror or error}")]) from error
    except ValueError as error:
        raise ConfigurationError([(field, path, str(error))]) from error
