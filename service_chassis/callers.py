"""Read who may call: a TOML file of callers, each known by a bearer token or by a name in a client's certificate.

    [[caller]]
    identity = "team-a"
    scopes = ["inference"]
    token_sha256 = "…"             # of the token, in hex: the file then holds no secret

    [[caller]]
    identity = "console"
    scopes = ["inference", "admin"]
    certificate = "spiffe://example.org/ns/ops/sa/console"

Several entries may have one identity, as while a token is replaced by the next.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INFERENCE, STATUS, ADMIN, RELAY = "inference", "status", "admin", "relay"
SCOPES = (INFERENCE, STATUS, ADMIN, RELAY)

# Of tokens that an identity provider signs. Public keys alone: with a shared secret whoever checks tokens could make
# them. "none" is no algorithm at all.
JWT_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")

MAX_IDENTITY_CHARS = 256
# Before what others name: a subject of the identity provider is never taken for somebody in the file.
JWT_PREFIX, CERTIFICATE_PREFIX = "jwt:", "certificate:"
# 20 characters of a random token are out of reach for guessing; who writes "secret" is told so.
_LEAST_TOKEN_CHARS = 20
_KINDS = ("token", "token_sha256", "certificate")
_KEYS = {"identity", "scopes", "max_requests", "max_waiting", *_KINDS}


class TokenRefused(Exception):
    """A token is no good; the text completes "the bearer token …" and may be told to whoever sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, as authentication knows it. ``identity`` is empty for somebody who showed nothing."""

    identity: str
    scopes: frozenset[str]
    max_requests: int | None = None  # at a time; None: as everybody
    max_waiting: int | None = None

    def may(self, scope: str) -> bool:
        """Say whether a scope is covered; who may administrate may look, too."""
        return scope in self.scopes or (scope == STATUS and ADMIN in self.scopes)


@dataclass(frozen=True, slots=True)
class Callers:
    """Everybody in a file."""

    by_token: tuple[tuple[bytes, Caller], ...] = field(repr=False)  # SHA-256 of the token
    by_certificate: Mapping[str, Caller]

    def of_token(self, token: str) -> Caller | None:
        """Return whose token it is. Takes as long whoever it is, or nobody."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, caller in self.by_token:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def of_certificate(self, names: Iterable[str]) -> Caller | None:
        """Return who has a certificate with these names; the first that is listed."""
        return next((self.by_certificate[name] for name in names if name in self.by_certificate), None)


def read_callers(path: str) -> Callers:
    """Read the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not as described above; the text names the entry and holds no secret.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        # Its own text may quote the line, with the token in it.
        where = re.search(r"\(at [^)]*\)", str(error))
        raise ValueError(f"is not TOML {where[0] if where else ''}".rstrip()) from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    entries = document.pop("caller", None)
    if document or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("must hold [[caller]] entries and nothing else")
    by_token: dict[bytes, Caller] = {}
    by_certificate: dict[str, Caller] = {}
    for number, entry in enumerate(entries, start=1):
        caller, digest, certificate = _read_entry(entry, f"caller {number}")
        if digest in by_token or certificate in by_certificate:
            raise ValueError(f"caller {number}: has the token or certificate of another entry")
        if digest is not None:
            by_token[digest] = caller
        if certificate is not None:
            by_certificate[certificate] = caller
    return Callers(tuple(by_token.items()), by_certificate)


def _read_entry(entry: Mapping[str, Any], place: str) -> tuple[Caller, bytes | None, str | None]:
    def wrong(rule: str) -> ValueError:
        return ValueError(f"{place}: {rule}")

    if unknown := sorted(set(entry) - _KEYS):
        raise wrong(f"has the unknown key {unknown[0]!r}; there are {', '.join(sorted(_KEYS))}")
    identity = entry.get("identity")
    if not isinstance(identity, str) or not is_identity(identity):
        raise wrong(f"identity must have 1 to {MAX_IDENTITY_CHARS} printable characters")
    if identity.startswith((JWT_PREFIX, CERTIFICATE_PREFIX)):
        raise wrong(f"identity must not begin with {JWT_PREFIX} or {CERTIFICATE_PREFIX}")
    scopes = entry.get("scopes")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise wrong(f"scopes must be a list of some of {', '.join(SCOPES)}")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1 or not isinstance(entry[kinds[0]], str) or not entry[kinds[0]]:
        raise wrong(f"must have one of {', '.join(_KINDS)}")
    for limit in ("max_requests", "max_waiting"):
        value = entry.get(limit, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise wrong(f"{limit} must be a whole number of at least 0")
    caller = Caller(
        identity=identity,
        scopes=frozenset(scopes),
        max_requests=entry.get("max_requests"),
        max_waiting=entry.get("max_waiting"),
    )
    value = entry[kinds[0]]
    if kinds[0] == "certificate":
        return caller, None, value
    if kinds[0] == "token_sha256":
        if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
            raise wrong("token_sha256 must be 64 hexadecimal digits")
        return caller, bytes.fromhex(value), None
    if len(value) < _LEAST_TOKEN_CHARS or not value.isascii() or not value.isprintable() or " " in value:
        raise wrong(f"token must have at least {_LEAST_TOKEN_CHARS} characters, visible ASCII without spaces")
    return caller, hashlib.sha256(value.encode()).digest(), None


def is_identity(text: str) -> bool:
    """Whether a text may name a caller, in logs and in the bytes that workers keep."""
    return 1 <= len(text) <= MAX_IDENTITY_CHARS and text.isprintable()
