"""Check bearer tokens that an identity provider signed (JWT), against its public keys in a file (JWKS).

Needs PyJWT, in the extra ``auth``. Its own text of what is wrong may quote the token, so ours is said instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from service_chassis.callers import JWT_ALGORITHMS, JWT_PREFIX, SCOPES, Caller, TokenRefused, is_identity
from service_chassis.watched_files import WatchedFiles

# Clocks of different machines differ.
LEEWAY_S = 30

# Whatever the libraries below raise on bytes that anybody may send.
_BAD_TOKEN = (jwt.PyJWTError, ValueError, TypeError, RecursionError)

_WHAT_IS_WRONG: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "has expired (exp)"),
    (jwt.ImmatureSignatureError, "is not valid yet (nbf or iat)"),
    (jwt.InvalidAudienceError, "is meant for another audience (aud)"),
    (jwt.InvalidIssuerError, "is of another issuer (iss)"),
    (jwt.MissingRequiredClaimError, "lacks one of exp, aud, iss and sub"),
    (jwt.InvalidAlgorithmError, "is signed with an algorithm that is not accepted (alg)"),
    (jwt.InvalidSignatureError, "has a wrong signature"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtRules:
    """What a token must say."""

    issuer: str
    audience: str
    algorithms: tuple[str, ...]


class JwtVerifier:
    """Knows the keys of one issuer, as they are in a file that may be replaced at any time."""

    def __init__(self, path: str, rules: JwtRules) -> None:
        """Read the keys. Raises ``OSError`` or ``ValueError`` as ``read_keys`` does."""
        assert set(rules.algorithms) <= set(JWT_ALGORITHMS), "shared secrets and none are never accepted"
        self._rules = rules
        self._watched = WatchedFiles((path,), lambda: read_keys(path), what="keys of JWT")

    def caller_of(self, token: str) -> Caller:
        """Return whose token it is. Raises ``TokenRefused``."""
        try:
            header = jwt.get_unverified_header(token)
        except _BAD_TOKEN:
            raise TokenRefused("is not a JWT") from None
        key_id = header.get("kid")
        key = self._watched.present()[0].keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise TokenRefused("names no key that is known here (kid)")
        try:
            # The algorithm must be on the list and be the key's own, whatever the token says.
            claims = jwt.decode(
                token,
                key,
                algorithms=list(self._rules.algorithms),
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud", "iss", "sub"]},
            )
        except _BAD_TOKEN as error:
            known = (said for kind, said in _WHAT_IS_WRONG if isinstance(error, kind))
            raise TokenRefused(next(known, "is not valid")) from None
        subject = claims["sub"]
        if not isinstance(subject, str) or not subject or not is_identity(JWT_PREFIX + subject):
            raise TokenRefused("has no usable subject (sub)")
        return Caller(identity=JWT_PREFIX + subject, scopes=_scopes_of(claims))


def _scopes_of(claims: Mapping[str, Any]) -> frozenset[str]:
    """Return the scopes that mean something here; ``scope`` as in RFC 8693, or a list in ``scp``."""
    said = claims.get("scope", claims.get("scp", ""))
    words = said.split() if isinstance(said, str) else said if isinstance(said, list) else ()
    return frozenset(word for word in words if word in SCOPES)


@dataclass(frozen=True, slots=True)
class Keys:
    """Public keys by their id; equal to others where the file says the same."""

    keys: Mapping[str, jwt.PyJWK]
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and other.text == self.text


def read_keys(path: str) -> Keys:
    """Read a JWKS file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no public key that can be used, or one that must not be in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = json.loads(text)["keys"]
        entries = [dict(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError('must be a JWKS: {"keys": [...]}') from None
    keys: dict[str, jwt.PyJWK] = {}
    for number, entry in enumerate(entries, start=1):
        if entry.get("kty") == "oct" or "d" in entry:
            raise ValueError(f"key {number}: is a secret; only public keys belong here")
        if entry.get("use", "sig") != "sig":
            continue
        key_id = entry.get("kid")
        if not isinstance(key_id, str) or not key_id or key_id in keys:
            raise ValueError(f"key {number}: must have a kid of its own")
        try:
            keys[key_id] = jwt.PyJWK(entry)
        except Exception:  # of several libraries, whose texts may quote the key
            continue  # another algorithm than ours, of which providers publish some
    if not keys:
        raise ValueError("holds no key that can be used")
    return Keys(keys, text)
