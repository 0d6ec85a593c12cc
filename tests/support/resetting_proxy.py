"""A proxy that does to HTTP/2 streams what proxies in front of services do: it ends those that are silent for too long.

It reads frame headers, so that it sees what such a proxy sees: only DATA counts, pings and window updates do not.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

_PREFACE_BYTES = 24
_HEADER_BYTES = 9
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM = 1
_CANCEL = (8).to_bytes(4, "big")


@dataclass(eq=False)
class _Connection:
    """Two sockets, and when each stream last had DATA in either direction."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    heard_at: dict[int, list[float]] = field(default_factory=dict)  # stream -> from the client, from the server


class ResettingProxy:
    """Listens at ``address`` and passes everything on to ``target``, both (host, port).

    Args:
        silence_s: a stream on which DATA is missing for so long in either direction is reset, at both ends.
    """

    def __init__(self, address: tuple[str, int], target: tuple[str, int], *, silence_s: float) -> None:
        self._address, self._target = address, target
        self._silence_s = silence_s
        self._connections: set[_Connection] = set()
        self.num_resets = 0
        self.num_streams = 0  # opened through it

    async def __aenter__(self) -> ResettingProxy:
        self._server = await asyncio.start_server(self._serve, *self._address)
        self._watch = asyncio.create_task(self._reset_silent_ones())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        self._server.close()
        for connection in list(self._connections):
            connection.client.transport.abort()
            connection.server.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, other_writer)
        self._connections.add(connection)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                other_writer.write(await reader.readexactly(_PREFACE_BYTES))
                await asyncio.wait(
                    {
                        asyncio.create_task(self._pass_on(connection, reader, other_writer, 0)),
                        asyncio.create_task(self._pass_on(connection, other_reader, writer, 1)),
                    },
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            self._connections.discard(connection)
            writer.transport.abort()
            other_writer.transport.abort()

    async def _pass_on(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: int
    ) -> None:
        """Pass whole frames on; ``side`` is 0 for those of the client."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                header = await reader.readexactly(_HEADER_BYTES)
                frame = header + await reader.readexactly(int.from_bytes(header[:3], "big"))
                self._note(connection, kind=header[3], flags=header[4], stream=_stream_of(header), side=side)
                writer.write(frame)

    def _note(self, connection: _Connection, *, kind: int, flags: int, stream: int, side: int) -> None:
        now = time.monotonic()
        if kind == _HEADERS and side == 0 and stream not in connection.heard_at:
            connection.heard_at[stream] = [now, now]
            self.num_streams += 1
        elif kind == _DATA and stream in connection.heard_at:
            connection.heard_at[stream][side] = now
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and side == 1 and flags & _END_STREAM):
            connection.heard_at.pop(stream, None)

    async def _reset_silent_ones(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / 20)
            since = time.monotonic() - self._silence_s
            for connection in self._connections:
                for stream in [one for one, heard in connection.heard_at.items() if min(heard) < since]:
                    reset = b"\0\0\4" + bytes((_RST_STREAM, 0)) + stream.to_bytes(4, "big") + _CANCEL
                    connection.client.write(reset)
                    connection.server.write(reset)
                    del connection.heard_at[stream]
                    self.num_resets += 1


def _stream_of(header: bytes) -> int:
    return int.from_bytes(header[5:9], "big") & 0x7FFF_FFFF
