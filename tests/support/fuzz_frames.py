"""Broken gRPC frames and broken HTTP/2 frames, written to a socket by hand."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from random import Random

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS = 1, 4
_AT_ONCE = 8


def frame(kind: int, flags: int, stream_id: int, body: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream_id) + body


def settings_frame() -> bytes:
    """Return how a client begins a connection."""
    return _PREFACE + frame(_SETTINGS, 0, 0)


def headers_frame(path: bytes, *more: tuple[bytes, bytes], flags: int = _END_HEADERS) -> bytes:
    """Return how a client begins the first call of a connection."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    fields += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), *more]
    # Literal, neither indexed nor compressed.
    return frame(_HEADERS, flags, 1, b"".join(b"\x00" + _counted(name) + _counted(value) for name, value in fields))


def _counted(raw: bytes) -> bytes:
    assert len(raw) < 127
    return bytes([len(raw)]) + raw


def _message(body: bytes, *, said_length: int | None = None, compressed: int = 0) -> bytes:
    return struct.pack(">BI", compressed, len(body) if said_length is None else said_length) + body


def _one(rng: Random, paths: Sequence[str], good: bytes) -> bytes:
    """Return what one connection says after its settings."""
    path = rng.choice(paths).encode()
    if rng.random() < 0.05:
        at = rng.randrange(len(path))
        path = path[:at] + rng.choice((b"\xae", b"\xff\xfe", b"\x00", b"\xc3\xa9", b"%")) + path[at + 1 :]
    more: list[tuple[bytes, bytes]] = []
    if rng.random() < 0.5:
        more.append((b"grpc-timeout", rng.choice((b"1S", b"0n", b"-5S", b"99999999999H", b"x"))))
    if rng.random() < 0.5:
        more.append((b"grpc-encoding", rng.choice((b"gzip", b"identity", b"zstd"))))
    if rng.random() < 0.2:
        more.append((b"authorization", rng.choice((b"Bearer \xff\xae", b"Bearer", b"\xc3\xa9", b""))))
    begin = headers_frame(path, *more)
    whole = _message(good)
    match rng.randrange(12):
        case 0:  # ends in the middle of a message
            return begin + frame(_DATA, _END_STREAM, 1, whole[: rng.randrange(len(whole))])
        case 1:  # says that it is longer, or shorter, than it is
            said = rng.choice((0, 1, len(good) + 1, 2**31, 2**32 - 1))
            return begin + frame(_DATA, _END_STREAM, 1, _message(good, said_length=said))
        case 2:  # says that it is compressed
            return begin + frame(_DATA, _END_STREAM, 1, _message(good, compressed=rng.choice((1, 2, 255))))
        case 3:  # no message at all
            return headers_frame(path, *more, flags=_END_HEADERS | _END_STREAM)
        case 4:  # two, or more, where one is wanted
            return begin + frame(_DATA, _END_STREAM, 1, whole * rng.choice((2, 50)))
        case 5:  # reset in the middle
            return (
                begin + frame(_DATA, 0, 1, whole[:7]) + frame(_RST_STREAM, 0, 1, struct.pack(">I", rng.randrange(14)))
            )
        case 6:  # a byte at a time, and never ended
            return begin + b"".join(frame(_DATA, 0, 1, whole[at : at + 1]) for at in range(len(whole)))
        case 7:  # data before headers, or for a stream that is over
            return frame(_DATA, _END_STREAM, rng.choice((0, 1, 2, 3)), whole)
        case 8:  # a frame of any kind, with any flags, for any stream
            noise = frame(rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 3, 2**31 - 1)), rng.randbytes(17))
            return begin + noise + frame(_DATA, _END_STREAM, 1, whole)
        case 9:  # a flood of small frames
            some = rng.choice(
                (frame(_PING, 0, 0, b"12345678"), frame(_SETTINGS, 0, 0), frame(_WINDOW_UPDATE, 0, 0, b"\x00" * 4))
            )
            return some * 500 + begin
        case 10:  # well formed, with a byte changed anywhere
            said = bytearray(begin + frame(_DATA, _END_STREAM, 1, whole))
            said[rng.randrange(len(said))] ^= 1 << rng.randrange(8)
            return bytes(said)
        case _:
            return rng.randbytes(rng.choice((1, 9, 300, 20_000)))


async def _say(address: str, said: bytes, rng: Random) -> None:
    """Say it on a connection of its own, listen for a moment, and go without a word."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        if rng.random() < 0.95:
            writer.write(settings_frame())
        writer.write(said)
        await writer.drain()
        async with asyncio.timeout(rng.choice((0.01, 0.1, 0.3))):
            while await reader.read(65536):
                pass
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()


async def break_frames(
    address: str, paths: Sequence[str], good: bytes, *, seed: int, seconds: float, check: Callable[[], Awaitable[None]]
) -> int:
    """Make broken connections for so long; fail, with what repeats it, where ``check`` does. Returns how many."""
    end = asyncio.get_running_loop().time() + seconds
    count = 0
    while asyncio.get_running_loop().time() < end:
        numbers = range(count, count + _AT_ONCE)
        rngs = [Random(f"{seed} frames {number}") for number in numbers]
        await asyncio.gather(*(_say(address, _one(rng, paths, good), rng) for rng in rngs))
        count += _AT_ONCE
        try:
            await check()
        except Exception as error:
            why = f"{type(error).__name__} {error}"
            raise AssertionError(f"frames {numbers} of MANIPLE_FUZZ_SEED={seed}: {why}") from error
    print(f"\nbroken frames: {count} connections, MANIPLE_FUZZ_SEED={seed}")
    return count
