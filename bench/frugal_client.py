"""A gRPC client that costs next to nothing: many server streams over one connection, by hand.

A client of a gRPC library in Python takes as much processor time for a message as the server that sends it. Elsewhere
clients have machines of their own; here they would fight with the server for two cores, and it is the server that is
measured. So this one speaks just enough HTTP/2: it sends requests, opens all windows wide, answers settings and pings,
and hands over messages. Trusting; for benches.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable

_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0x0, 0x1, 0x4, 0x6, 0x8
_ACK, _END_STREAM, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 0x4
_MOST_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65535
_MOST_FRAME = 16384

OnMessage = Callable[[bytes], None]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _header(name: str, value: str) -> bytes:
    """Write a header as it is: a literal without indexing, no Huffman code."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


class FrugalClient(asyncio.Protocol):
    """One connection. ``call`` sends a request and tells every message that comes back."""

    def __init__(self) -> None:
        self.ended: set[int] = set()  # numbers of streams that the server ended
        self.is_lost = False
        self._readers: dict[int, OnMessage] = {}
        self._wakes: dict[int, Callable[[], None]] = {}  # of those who read a stream as an iterator
        self._parts: dict[int, bytes] = {}  # of messages that are not whole
        self._held = b""  # of a frame that is not whole
        self._next_stream = 1
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, path: str) -> FrugalClient:
        """Connect to a Unix socket."""
        _, client = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return client

    @classmethod
    async def connect_to(cls, address: str) -> FrugalClient:
        """Connect to HOST:PORT or unix:PATH."""
        if address.startswith("unix:"):
            return await cls.connect(address.removeprefix("unix:"))
        host, _, port = address.rpartition(":")
        _, client = await asyncio.get_running_loop().create_connection(cls, host.strip("[]"), int(port))
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _MOST_WINDOW)
        more = struct.pack(">I", _MOST_WINDOW - _FIRST_WINDOW)
        transport.write(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, more)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        for wake in self._wakes.values():
            wake()

    def call(self, method: str, request: bytes, on_message: OnMessage) -> int:
        """Send a request; return the number of its stream.

        Raises:
            ValueError: the request is larger than a server must take before it has answered.
        """
        assert self._transport is not None
        if len(request) > _FIRST_WINDOW - 5:
            raise ValueError(f"a request of {len(request)} bytes: this client sends at most {_FIRST_WINDOW - 5}")
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._readers[stream] = on_message
        headers = b"".join(
            (
                _header(":method", "POST"),
                _header(":scheme", "http"),
                _header(":path", method),
                _header(":authority", "localhost"),
                _header("te", "trailers"),
                _header("content-type", "application/grpc"),
            )
        )
        body = b"\0" + struct.pack(">I", len(request)) + request
        frames = [_frame(_HEADERS, _END_HEADERS, stream, headers)]
        for start in range(0, len(body), _MOST_FRAME):
            is_last = start + _MOST_FRAME >= len(body)
            frames.append(_frame(_DATA, _END_STREAM * is_last, stream, body[start : start + _MOST_FRAME]))
        self._transport.write(b"".join(frames))
        return stream

    async def messages(self, method: str, request: bytes) -> AsyncIterator[bytes]:
        """Send a request and yield the messages that come back, until the server ends the stream.

        Raises:
            ConnectionError: the connection was lost before.
        """
        woken, arrived = asyncio.Event(), list[bytes]()

        def take(message: bytes) -> None:
            arrived.append(message)
            woken.set()

        stream = self.call(method, request, take)
        self._wakes[stream] = woken.set
        try:
            while arrived or stream not in self.ended:
                if self.is_lost:
                    raise ConnectionError("the connection was lost")
                if not arrived:
                    await woken.wait()
                woken.clear()
                now, arrived[:] = list(arrived), ()
                for message in now:
                    yield message
        finally:
            del self._wakes[stream], self._readers[stream]
            self.ended.discard(stream)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        data, at = self._held + data, 0
        while len(data) - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            end = at + 9 + length
            if end > len(data):
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA:
                self._take(int.from_bytes(data[at + 5 : at + 9], "big"), data[at + 9 : end])
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._transport.write(_frame(kind, _ACK, 0, data[at + 9 : end] if kind == _PING else b""))
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                ended = int.from_bytes(data[at + 5 : at + 9], "big")
                self.ended.add(ended)
                if ended in self._wakes:
                    self._wakes[ended]()
            at = end
        self._held = data[at:]

    def _take(self, stream: int, payload: bytes) -> None:
        held = self._parts.pop(stream, b"") + payload
        while len(held) >= 5:
            end = 5 + int.from_bytes(held[1:5], "big")
            if end > len(held):
                break
            if stream in self._readers:
                self._readers[stream](held[5:end])
            held = held[end:]
        if held:
            self._parts[stream] = held

    def close(self) -> None:
        """Drop the connection, and with it every stream."""
        if self._transport is not None:
            self._transport.abort()
