"""Decide who may call what, before any handler runs and before a request is even parsed where its token is no good.

Every method needs a scope from one table. A method that is not in it is refused, whoever calls: what somebody adds and
forgets to think about is closed. Who the caller is, handlers learn from ``current_caller``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from service_chassis.callers import CERTIFICATE_PREFIX, INFERENCE, RELAY, Caller, Callers, TokenRefused
from service_chassis.errors import ManipleError, PermissionDenied, Unauthenticated
from service_chassis.method_handlers import Continuation, behaviour_of, maker_like
from service_chassis.watched_files import WatchedFiles

if TYPE_CHECKING:
    from service_chassis.jwt_verifier import JwtVerifier

# Scopes of the table that nobody is given: a method for everybody, and one for everybody who is known.
PUBLIC, ANY_CALLER = "public", "any caller"

RELAYED_KEY = "maniple-relayed"  # metadata of a call that another control plane passes on
RELAYED_CALLER_KEY = "maniple-relayed-caller-bin"  # whom it authenticated by a certificate

Metadata = Sequence[tuple[str, str | bytes]]
Context = grpc.aio.ServicerContext[Any, Any]

NOBODY = Caller(identity="", scopes=frozenset())
_caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY)


def current_caller() -> Caller:
    """Return who makes the call that this task serves."""
    return _caller.get()


def certificate_names(auth_context: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in the certificate that a client showed: its alternative names, then its common name."""
    found = [
        *auth_context.get("x509_subject_alternative_name", ()),
        *auth_context.get("x509_common_name", ()),
    ]
    return tuple(dict.fromkeys(name.decode("utf-8", "replace") for name in found if name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Authentication:
    """What callers can show."""

    callers: WatchedFiles[Callers] | None = None
    jwt: JwtVerifier | None = None
    certificates: bool = False  # clients must show one

    @property
    def is_configured(self) -> bool:
        """Whether anybody can be told from anybody else."""
        return self.callers is not None or self.jwt is not None or self.certificates

    @property
    def knows_tokens(self) -> bool:
        """Whether bearer tokens mean anything here. Elsewhere they are others' affair, such as a mesh's."""
        return self.callers is not None or self.jwt is not None

    def of_token(self, token: str) -> Caller:
        """Return whose bearer token it is. Raises ``Unauthenticated``."""
        if self.callers is not None and (known := self.callers.present()[0].of_token(token)) is not None:
            return known
        if self.jwt is None:
            raise Unauthenticated("the bearer token is not known")
        try:
            return self.jwt.caller_of(token)
        except TokenRefused as error:
            raise Unauthenticated(f"the bearer token {error}") from None

    def of_certificate(self, names: Sequence[str]) -> Caller | None:
        """Return who showed a certificate with these names; its authority was checked by TLS."""
        if self.callers is not None:
            return self.callers.present()[0].of_certificate(names)
        if self.jwt is not None:
            return None  # the token says who it is
        return Caller(identity=CERTIFICATE_PREFIX + ",".join(sorted(names)), scopes=frozenset({INFERENCE}))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Who may call what on one server."""

    scopes_of_methods: Mapping[str, str]  # "/package.Service/Method" -> scope
    authentication: Authentication = field(default_factory=Authentication)
    anonymous_scopes: frozenset[str] = frozenset()  # of callers who show nothing, where nobody could show anything
    closed: str = ""  # why an anonymous caller is refused the rest, and what to do about it
    not_here: Mapping[str, str] = field(default_factory=dict)  # service -> where it is served instead

    def scope_of(self, method: str) -> str:
        """Return what a method needs. Raises ``PermissionDenied`` where nobody said."""
        scope = self.scopes_of_methods.get(method)
        if scope is None:
            raise PermissionDenied(f"{method} has no scope and is served to nobody")
        return scope

    def check(self, method: str, caller: Caller | None) -> Caller:
        """Return who calls, if he may. None: nobody that is known.

        Raises:
            Unauthenticated: he might, if he were known.
            PermissionDenied: he may not.
        """
        scope = self.scope_of(method)
        if (elsewhere := self.not_here.get(method.split("/")[1])) is not None:
            raise PermissionDenied(f"{method} {elsewhere}")
        if caller is None and self.authentication.is_configured and scope != PUBLIC:
            raise Unauthenticated("a bearer token, or a certificate that is listed, is needed")
        if caller is None:
            caller = Caller(identity="", scopes=self.anonymous_scopes)
            if scope in (PUBLIC, ANY_CALLER) or caller.may(scope):
                return caller
            raise PermissionDenied(f"{method} needs the scope {scope}: {self.closed}")
        if scope in (PUBLIC, ANY_CALLER) or caller.may(scope):
            return caller
        raise PermissionDenied(f"{method} needs the scope {scope}, which {caller.identity!r} does not have")


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Holds the policy before every method of a server."""

    def __init__(self, policy: AccessPolicy) -> None:
        self._policy = policy

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler behind a check, or one that only refuses."""
        method: str = handler_call_details.method
        metadata: Metadata = tuple(handler_call_details.invocation_metadata or ())
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        authentication = self._policy.authentication
        try:
            is_public = self._policy.scope_of(method) == PUBLIC
            # What is for everybody is not refused for a token that it did not ask for.
            token = bearer_token(metadata) if authentication.knows_tokens and not is_public else None
            known = None if token is None else caller_behind_relay(authentication.of_token(token), metadata, token=True)
            if known is not None or is_public or not authentication.certificates:
                caller = self._policy.check(method, known)
                return _checked(handler, lambda context: caller)
        except ManipleError as error:
            return _refusing(handler, error)
        # The certificate is seen once the call is there.
        return _checked(handler, lambda context: self._caller_by_certificate(method, metadata, context))

    def _caller_by_certificate(self, method: str, metadata: Metadata, context: Context) -> Caller:
        names = certificate_names(context.auth_context())
        known = caller_behind_relay(self._policy.authentication.of_certificate(names), metadata)
        return self._policy.check(method, known)


def bearer_token(metadata: Metadata) -> str | None:
    """Return the token of a call; None where it brings none. Raises ``Unauthenticated`` for something else."""
    found = [value for key, value in metadata if key == "authorization"]
    if not found:
        return None
    value = found[0]
    scheme, _, token = (value if isinstance(value, str) else "").partition(" ")
    if len(found) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the metadata authorization must be there once, as: Bearer TOKEN")
    return token.strip()


def caller_behind_relay(relay: Caller | None, metadata: Metadata, *, token: bool = False) -> Caller | None:
    """Return for whom another control plane passes a call on.

    Only who has the scope may speak for others. A call that came with a client's own ``token`` is that client's; one
    that is passed on by a certificate without the scope must not count as its own, or all clients behind it could
    resume and abort each other's requests.
    """
    passed_on = dict(metadata)
    if RELAYED_KEY not in passed_on or relay is None or (token and not relay.may(RELAY)):
        return relay
    if not relay.may(RELAY):
        raise PermissionDenied(f"{relay.identity!r} passes a call on, which needs the scope {RELAY}")
    identity = passed_on.get(RELAYED_CALLER_KEY, b"")
    if not isinstance(identity, bytes) or not identity:
        return None  # the other one did not know who calls
    return Caller(identity=identity.decode("utf-8", "replace"), scopes=frozenset({INFERENCE}))


def _refusing(handler: grpc.RpcMethodHandler[Any, Any], error: ManipleError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(request: Any, context: Context) -> Any:
        raise error

    # Without a deserializer: nothing of the request is looked at.
    return _of_kind(handler, refuse, parsed=False)


def _checked(
    handler: grpc.RpcMethodHandler[Any, Any], caller_of: Callable[[Context], Caller]
) -> grpc.RpcMethodHandler[Any, Any]:
    behaviour = behaviour_of(handler)

    # No coroutine: what the handler returns, a generator or something to await, is the error interceptors' to run.
    def answer(request: Any, context: Context) -> Any:
        _caller.set(caller_of(context))
        return behaviour(request, context)

    return _of_kind(handler, answer, parsed=True)


def _of_kind(
    handler: grpc.RpcMethodHandler[Any, Any], answer: Callable[[Any, Any], Any], *, parsed: bool
) -> grpc.RpcMethodHandler[Any, Any]:
    return maker_like(handler)(
        answer,
        request_deserializer=handler.request_deserializer if parsed else None,
        response_serializer=handler.response_serializer,
    )


class PeerNamesInterceptor(grpc.aio.ServerInterceptor):
    """Serves only clients with one of these names in their certificate, whatever they call."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler behind a check."""
        handler = await continuation(handler_call_details)
        return None if handler is None else _checked(handler, self._caller_of)

    def _caller_of(self, context: Context) -> Caller:
        names = certificate_names(context.auth_context())
        if self._names.isdisjoint(names):
            shown = ", ".join(names) or "none"
            raise PermissionDenied(f"the names in the certificate, {shown}, are not in --tls-client-names")
        return Caller(identity=CERTIFICATE_PREFIX + ",".join(sorted(names)), scopes=frozenset())
