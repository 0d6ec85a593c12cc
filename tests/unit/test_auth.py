"""Who may call what: the callers file, tokens of an identity provider, and the policy before every method."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest

from control_plane.relay import OwnerChannels
from service_chassis.auth import (
    ANY_CALLER,
    PUBLIC,
    RELAYED_CALLER_KEY,
    RELAYED_KEY,
    AccessPolicy,
    Authentication,
    bearer_token,
    caller_behind_relay,
    certificate_names,
)
from service_chassis.callers import ADMIN, INFERENCE, RELAY, STATUS, Caller, TokenRefused, read_callers
from service_chassis.errors import PermissionDenied, Unauthenticated
from service_chassis.jwt_verifier import JwtRules, JwtVerifier, read_keys
from service_chassis.watched_files import WatchedFiles
from support.jwt_issuer import AUDIENCE, ISSUER, Issuer
from support.logs import captured_log

TEAM_A, OPS = "token-of-team-a-0123456789", "token-of-ops-0123456789abc"
SHA = hashlib.sha256(OPS.encode()).hexdigest()
CALLERS = f"""
[[caller]]
identity = "team-a"
scopes = ["inference"]
token = "{TEAM_A}"
max_requests = 2

[[caller]]
identity = "ops"
scopes = ["admin"]
token_sha256 = "{SHA}"

[[caller]]
identity = "console"
scopes = ["status"]
certificate = "spiffe://test/console"
"""


def callers_file(path: Path, text: str = CALLERS) -> str:
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.replace(path)
    return str(path)


def test_callers_are_known_by_token_hash_and_certificate(tmp_path: Path) -> None:
    callers = read_callers(callers_file(tmp_path / "callers.toml"))
    team_a, ops = callers.of_token(TEAM_A), callers.of_token(OPS)
    assert team_a == Caller(identity="team-a", scopes=frozenset({INFERENCE}), max_requests=2)
    assert ops == Caller(identity="ops", scopes=frozenset({ADMIN}))
    for nobody in ("", TEAM_A[:-1], TEAM_A + "0", SHA, "\udcff"):
        assert callers.of_token(nobody) is None
    console = callers.of_certificate(["other.test", "spiffe://test/console"])
    assert console is not None
    assert (console.identity, callers.of_certificate(["other.test"])) == ("console", None)
    assert TEAM_A not in repr(callers)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (f'[[caller]]\ntoken = "{TEAM_A}', r"is not TOML \(at .*\)"),
        ('[caller]\nidentity = "a"', "must hold [[caller]] entries and nothing else"),
        ("[[callers]]", "must hold [[caller]] entries and nothing else"),
        ("caller = [1]", "must hold [[caller]] entries and nothing else"),
        ('[[caller]]\nidentity = ""', "caller 1: identity must have 1 to 256 printable characters"),
        ('[[caller]]\nidentity = "jwt:ann"', "caller 1: identity must not begin with jwt: or certificate:"),
        ('[[caller]]\nidentity = "a"\nscopes = ["root"]', "caller 1: scopes must be a list of some of"),
        ('[[caller]]\nidentity = "a"\nscopes = []', "caller 1: scopes must be a list of some of"),
        ('[[caller]]\nidentity = "a"\nscopes = ["admin"]', "caller 1: must have one of token"),
        ('[[caller]]\nidentity = "a"\nscopes = ["admin"]\ntoken = "secret"', "caller 1: token must have at least 20"),
        ('[[caller]]\nidentity = "a"\nscopes = ["admin"]\ntoken_sha256 = "abc"', "caller 1: token_sha256 must be 64"),
        ('[[caller]]\nidentity = "a"\nscopes = ["admin"]\ncertificate = ""', "caller 1: must have one of"),
        (CALLERS.replace("max_requests = 2", "max_requests = true"), "caller 1: max_requests must be a whole number"),
        (CALLERS.replace("max_requests", "max_request"), "caller 1: has the unknown key 'max_request'"),
        (CALLERS + CALLERS, "caller 4: has the token or certificate of another entry"),
    ],
)
def test_callers_file_that_is_wrong_is_refused_with_its_entry_and_without_its_secret(
    tmp_path: Path, text: str, rule: str
) -> None:
    with pytest.raises(ValueError) as caught:
        read_callers(callers_file(tmp_path / "callers.toml", text))
    said = str(caught.value)
    assert said.startswith(rule) or (rule.startswith("is not TOML") and said.startswith("is not TOML (at"))
    assert TEAM_A not in said


def test_tokens_are_rotated_by_replacing_the_file_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = callers_file(tmp_path / "callers.toml")
    watched = WatchedFiles((path,), lambda: read_callers(path), what="callers")
    authentication = Authentication(callers=watched)
    new = "the-next-token-of-team-a-42"
    both = CALLERS + f'[[caller]]\nidentity = "team-a"\nscopes = ["inference"]\ntoken = "{new}"\n'
    callers_file(tmp_path / "callers.toml", both)
    assert {authentication.of_token(token).identity for token in (TEAM_A, new)} == {"team-a"}
    with captured_log() as log:
        callers_file(tmp_path / "callers.toml", both.replace("scopes", "scope"))
        assert authentication.of_token(new).identity == "team-a"
        callers_file(tmp_path / "callers.toml", CALLERS.replace(TEAM_A, new))
        with pytest.raises(Unauthenticated):
            authentication.of_token(TEAM_A)
    assert "files.refused" in log.getvalue()
    assert not any(secret in log.getvalue() for secret in (TEAM_A, new))
    assert authentication.of_token(new).identity == "team-a"


# Tokens of an identity provider


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


def verifier_of(issuer: Issuer, *algorithms: str) -> JwtVerifier:
    rules = JwtRules(issuer=ISSUER, audience=AUDIENCE, algorithms=algorithms or ("ES256", "RS256"))
    return JwtVerifier(str(issuer.path), rules)


def test_token_of_the_issuer_says_who_it_is_and_only_scopes_that_exist(issuer: Issuer) -> None:
    verifier = verifier_of(issuer)
    assert verifier.caller_of(issuer.token()) == Caller(identity="jwt:ann", scopes=frozenset({INFERENCE}))
    rs = verifier.caller_of(issuer.token("rsa-1", alg="RS256", scope=None, scp=["admin", 3], aud=["x", AUDIENCE]))
    assert rs.scopes == {ADMIN}
    assert verifier.caller_of(issuer.token(scope=None)).scopes == frozenset()


def forged(header: dict[str, Any], claims: dict[str, Any], key: bytes = b"") -> str:
    """Return a token that no library would make."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signature = hmac.new(key, b".".join(parts), hashlib.sha256).digest() if key else b""
    return b".".join([*parts, base64.urlsafe_b64encode(signature).rstrip(b"=")]).decode()


def test_token_that_breaks_a_rule_is_refused_with_that_rule(issuer: Issuer) -> None:
    verifier, now = verifier_of(issuer), time.time()
    public = json.dumps(json.loads(issuer.path.read_text())["keys"][0]).encode()
    for token, rule in (
        (issuer.token(exp=now - 60), "has expired"),
        (issuer.token(nbf=now + 90), "is not valid yet"),
        (issuer.token(aud="another"), "is meant for another audience"),
        (issuer.token(iss="https://evil.test"), "is of another issuer"),
        *((issuer.token(**{claim: None}), "lacks one of") for claim in ("exp", "aud", "iss", "sub")),
        (issuer.token(kid="unknown"), "names no key"),
        (issuer.token(kid=None), "names no key"),
        (issuer.token("rsa-1", alg="RS512"), "is signed with an algorithm that is not accepted"),
        (issuer.token("rsa-1", alg="RS256", kid="ec-1"), "is signed with an algorithm that is not accepted"),
        (forged({"alg": "none", "kid": "ec-1"}, issuer.claims()), "is signed with an algorithm"),
        (forged({"alg": "HS256", "kid": "ec-1"}, issuer.claims(), key=public), "is signed with an algorithm"),
        (forged({"alg": "ES256", "kid": "ec-1"}, issuer.claims(), key=b"guess"), "has a wrong signature"),
        (forged({"alg": "ES256", "kid": ["ec-1"]}, issuer.claims()), "(is not a JWT|names no key)"),
        (issuer.token(sub=""), "has no usable subject"),
        (issuer.token(sub="a\nb"), "has no usable subject"),
        ("a.b.c", "is not a JWT"),
        ("[" * 4000, "is not a JWT"),
    ):
        with pytest.raises(TokenRefused, match=rule):
            verifier.caller_of(token)
    changed = issuer.token().split(".")
    changed[1] = issuer.token(scope="admin").split(".")[1]
    with pytest.raises(TokenRefused, match="has a wrong signature"):
        verifier.caller_of(".".join(changed))


def test_keys_are_rotated_by_replacing_the_file(issuer: Issuer) -> None:
    verifier, old = verifier_of(issuer), issuer.token()
    issuer.rotate()
    assert verifier.caller_of(issuer.token("ec-2")).identity == "jwt:ann"
    with pytest.raises(TokenRefused, match="names no key"):
        verifier.caller_of(old)
    issuer.path.write_text("{")
    assert verifier.caller_of(issuer.token("ec-2")).identity == "jwt:ann"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must be a JWKS"),
        ('{"keys": 3}', "must be a JWKS"),
        ('{"keys": []}', "holds no key that can be used"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}', "key 1: is a secret"),
        ('{"keys": [{"kty": "EC", "d": "x", "kid": "a"}]}', "key 1: is a secret"),
        ('{"keys": [{"kty": "EC"}]}', "key 1: must have a kid of its own"),
        ('{"keys": [{"kty": "RSA", "use": "enc", "kid": "a"}]}', "holds no key that can be used"),
        ('{"keys": [{"kty": "EC", "crv": "?", "kid": "a"}]}', "holds no key that can be used"),
    ],
)
def test_jwks_file_that_is_no_good_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "jwks.json").write_text(text)
    with pytest.raises(ValueError, match=rule):
        read_keys(str(tmp_path / "jwks.json"))


# The policy

METHODS = {"/s/Infer": INFERENCE, "/s/Status": STATUS, "/s/Admin": ADMIN, "/s/Health": PUBLIC, "/s/Reflect": ANY_CALLER}


def may_call(policy: AccessPolicy, caller: Caller | None) -> set[str]:
    allowed = set()
    for method in [*METHODS, "/s/Forgotten"]:
        try:
            policy.check(method, caller)
            allowed.add(method.removeprefix("/s/"))
        except (PermissionDenied, Unauthenticated):
            continue
    return allowed


def test_policy_covers_every_scope_and_serves_a_method_without_one_to_nobody(tmp_path: Path) -> None:
    path = callers_file(tmp_path / "callers.toml")
    authentication = Authentication(callers=WatchedFiles((path,), lambda: read_callers(path), what="callers"))
    policy = AccessPolicy(scopes_of_methods=METHODS, authentication=authentication)
    every = {INFERENCE, STATUS, ADMIN, RELAY}
    assert may_call(policy, None) == {"Health"}
    assert may_call(policy, Caller(identity="a", scopes=frozenset())) == {"Health", "Reflect"}
    assert may_call(policy, Caller(identity="a", scopes=frozenset({INFERENCE}))) == {"Health", "Reflect", "Infer"}
    assert may_call(policy, Caller(identity="a", scopes=frozenset({STATUS}))) == {"Health", "Reflect", "Status"}
    assert may_call(policy, Caller(identity="a", scopes=frozenset({ADMIN}))) == {"Health", "Reflect", "Status", "Admin"}
    assert may_call(policy, Caller(identity="a", scopes=frozenset(every))) == {name[3:] for name in METHODS}
    with pytest.raises(Unauthenticated):
        policy.check("/s/Infer", None)
    with pytest.raises(PermissionDenied, match="'a' does not have"):
        policy.check("/s/Admin", Caller(identity="a", scopes=frozenset({INFERENCE, STATUS})))


def test_policy_without_authentication_serves_what_is_open_and_says_why_the_rest_is_not() -> None:
    policy = AccessPolicy(scopes_of_methods=METHODS, anonymous_scopes=frozenset({INFERENCE}), closed="give --flag")
    assert may_call(policy, None) == {"Health", "Reflect", "Infer"}
    with pytest.raises(PermissionDenied, match="needs the scope admin: give --flag"):
        policy.check("/s/Admin", None)


def test_bearer_token_is_read_and_anything_else_is_refused() -> None:
    assert bearer_token([("x", "y")]) is None
    assert bearer_token([("authorization", "bearer  abc ")]) == "abc"
    for wrong in ([("authorization", "Basic abc")], [("authorization", "Bearer ")], [("authorization", b"Bearer x")]):
        with pytest.raises(Unauthenticated):
            bearer_token(wrong)
    with pytest.raises(Unauthenticated):
        bearer_token([("authorization", "Bearer a"), ("authorization", "Bearer b")])


def test_certificate_without_other_means_gives_inference_and_a_listed_one_what_is_listed(tmp_path: Path) -> None:
    names = certificate_names(
        {"x509_subject_alternative_name": [b"spiffe://test/console", b"b.test"], "x509_common_name": [b"", b"b.test"]}
    )
    assert names == ("spiffe://test/console", "b.test")
    alone = Authentication(certificates=True).of_certificate(names)
    assert alone == Caller(identity="certificate:b.test,spiffe://test/console", scopes=frozenset({INFERENCE}))
    path = callers_file(tmp_path / "callers.toml")
    watched = WatchedFiles((path,), lambda: read_callers(path), what="callers")
    listed = Authentication(certificates=True, callers=watched)
    console = listed.of_certificate(names)
    assert console is not None
    assert (console.identity, listed.of_certificate(["b.test"])) == ("console", None)


def test_only_a_relay_speaks_for_others() -> None:
    relay = Caller(identity="plane", scopes=frozenset({RELAY}))
    ordinary = Caller(identity="ann", scopes=frozenset({INFERENCE, ADMIN}))
    passed_on = [(RELAYED_KEY, "1"), (RELAYED_CALLER_KEY, b"certificate:ann")]
    assert caller_behind_relay(ordinary, [(RELAYED_CALLER_KEY, b"bob")]) is ordinary
    assert caller_behind_relay(relay, passed_on) == Caller(identity="certificate:ann", scopes=frozenset({INFERENCE}))
    assert caller_behind_relay(relay, passed_on[:1]) is None
    assert caller_behind_relay(None, passed_on) is None
    with pytest.raises(PermissionDenied, match="needs the scope relay"):
        caller_behind_relay(ordinary, passed_on)
    # A client's own token that was passed on says who he is, whatever else is said.
    assert caller_behind_relay(ordinary, passed_on, token=True) is ordinary
    assert caller_behind_relay(relay, passed_on, token=True) == caller_behind_relay(relay, passed_on)


def test_control_plane_that_is_known_by_a_token_shows_the_one_of_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    channels = OwnerChannels(
        max_message_bytes=1, token=WatchedFiles((str(path),), path.read_text, what="the token for other control planes")
    )
    assert dict(channels.in_the_name_of("")) == {RELAYED_KEY: "1", "authorization": "Bearer first"}
    path.write_text("second one")
    expected = {RELAYED_KEY: "1", RELAYED_CALLER_KEY: b"ann", "authorization": "Bearer second one"}
    assert dict(channels.in_the_name_of("ann")) == expected
