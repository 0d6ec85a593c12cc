"""A proxy that resets streams in the middle, as HTTP/2 proxies do whose upstream broke or took too long.

It relays bytes and reads nothing but the heads of frames. On each connection the first stream that has brought so many
data frames gets a RST_STREAM, on both sides; clients see what their library makes of that, without any trailers.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_DATA, _RST_STREAM = 0, 3
_INTERNAL_ERROR, _CANCEL = 2, 8


def _rst_stream(stream_id: int, code: int) -> bytes:
    return struct.pack(">I", 4)[1:] + struct.pack(">BBI", _RST_STREAM, 0, stream_id) + struct.pack(">I", code)


class _Proxy:
    def __init__(self, address: str, after: int) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._after = after

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection. Its first stream that gets far enough is reset, and no other."""
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as group:
                up = group.create_task(self._up(reader, up_writer))
                group.create_task(self._down(up_reader, writer, up_writer)).add_done_callback(lambda _: up.cancel())
        except* OSError:
            pass
        finally:
            writer.close()
            up_writer.close()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
        writer.write_eof()

    async def _down(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up_writer: asyncio.StreamWriter
    ) -> None:
        num_data_frames: Counter[int] = Counter()
        reset = 0
        while True:
            try:
                head = await reader.readexactly(9)
                length, kind, stream_id = int.from_bytes(head[:3]), head[3], int.from_bytes(head[5:]) & 0x7FFFFFFF
                body = await reader.readexactly(length)
            except asyncio.IncompleteReadError:
                return
            if stream_id and stream_id == reset and kind == _DATA:
                continue  # headers still pass: both sides keep one table of them for the whole connection
            writer.write(head + body)
            if kind == _DATA and not reset:
                num_data_frames[stream_id] += 1
                if num_data_frames[stream_id] == self._after:
                    reset = stream_id
                    writer.write(_rst_stream(stream_id, _INTERNAL_ERROR))
                    up_writer.write(_rst_stream(stream_id, _CANCEL))
            await writer.drain()


@contextmanager
def resetting_proxy(address: str, *, after: int) -> Iterator[str]:
    """Serve on a port of its own before ``address``; reset a stream of each connection after so many data frames."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy = _Proxy(address, after)

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(proxy.serve, "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
