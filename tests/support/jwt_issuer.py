"""An identity provider for tests: keys, the JWKS file of their public halves, and tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

ISSUER, AUDIENCE = "https://idp.test", "maniple"
# One for all tests: to make one takes a tenth of a second.
_RSA = rsa.generate_private_key(65537, 2048)


class Issuer:
    """Signs with the key ``ec-1`` unless told otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, Any] = {"ec-1": ec.generate_private_key(ec.SECP256R1()), "rsa-1": _RSA}
        self.publish()

    def publish(self, *more: dict[str, Any]) -> None:
        """Write the JWKS file, as a whole."""
        entries = [{**_public(key), "kid": name, "use": "sig"} for name, key in self.keys.items()]
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps({"keys": [*entries, *more]}))
        scratch.replace(self.path)

    def rotate(self) -> None:
        """Replace the key ``ec-1`` by ``ec-2``."""
        del self.keys["ec-1"]
        self.keys["ec-2"] = ec.generate_private_key(ec.SECP256R1())
        self.publish()

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Return good claims, with some changed or (None) left out."""
        now = int(time.time())
        good = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 300, "scope": "inference openid"}
        return {name: value for name, value in {**good, **changed}.items() if value is not None}

    def token(self, key: str = "ec-1", *, alg: str = "ES256", kid: str | None = "", **changed: Any) -> str:
        headers = {} if kid is None else {"kid": kid or key}
        return jwt.encode(self.claims(**changed), self.keys[key], algorithm=alg, headers=headers)


def _public(key: Any) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return dict(algorithm.to_jwk(key.public_key(), as_dict=True))
