"""Open connections to other services: all of them go through here, in plaintext or over TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import grpc

from service_chassis.tls import ClientTls

Stub = TypeVar("Stub")

Options = Sequence[tuple[str, int | str]]


def open_channel(target: str, options: Options, tls: ClientTls | None) -> grpc.aio.Channel:
    """Return a channel, connected by its first call. A Unix socket needs no TLS: its directory guards it."""
    if tls is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=list(options))
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(target, tls.credentials(), options=[*options, *named])


class Connection(Generic[Stub]):
    """A channel and its stub, made anew when certificates were renewed. Calls on the old one come to their end.

    A channel keeps the certificate that it was made with, and shows it again whenever it reconnects, long after it has
    expired. Belongs to one event loop.
    """

    def __init__(
        self, target: str, options: Options, tls: ClientTls | None, make_stub: Callable[[grpc.aio.Channel], Stub]
    ) -> None:
        self._target = target
        self._options = options
        self._tls = tls
        self._make_stub = make_stub
        # Ones of before, which may still have calls: a stream of steps lives for months. Certificates are renewed daily
        # at most, and without calls an old channel gives its connection up by itself; so none is counted and closed.
        self._old: list[grpc.aio.Channel] = []
        self._open()

    def _open(self) -> None:
        self._generation = self._tls.generation if self._tls else 0
        self._channel = open_channel(self._target, self._options, self._tls)
        self._stub = self._make_stub(self._channel)

    @property
    def stub(self) -> Stub:
        """What to make the next call with. Not to be kept."""
        if self._tls is not None and self._tls.generation != self._generation:
            self._old.append(self._channel)
            self._open()
        return self._stub

    async def close(self) -> None:
        """End it with all calls."""
        await asyncio.gather(*(channel.close(None) for channel in (self._channel, *self._old)))
