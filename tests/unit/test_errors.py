"""Every error fits into trailers, whatever a client made us say in it."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2

from service_chassis.errors import MAX_TRAILER_BYTES, InvalidParameter, ManipleError, NotReady, clip, trailer_bytes

LONG = 70_000


def reason_in(error: ManipleError) -> str:
    info = error_details_pb2.ErrorInfo()
    assert error.status().details[0].Unpack(info)
    return info.reason


@pytest.mark.parametrize("letter", ["x", "é", "👩", "\x00", "%", "\ud800"])
@pytest.mark.parametrize("where", ["field", "value", "rule", "all"])
def test_refusal_fits_and_keeps_its_reason_when_a_client_gave_part_of_it(letter: str, where: str) -> None:
    long = letter * LONG
    parts = {"field": "seed", "value": "1", "rule": "must be odd", **({where: long} if where != "all" else {})}
    error = InvalidParameter(**(dict.fromkeys(parts, long) if where == "all" else parts))
    assert trailer_bytes(error.status()) <= MAX_TRAILER_BYTES
    assert reason_in(error) == "INVALID_PARAMETER"
    assert error.status().message.startswith(error.field[:20].encode("utf-8", "replace").decode())


def test_status_of_many_long_facts_fits() -> None:
    error = NotReady("not now " * 1000, metadata={f"fact_{n}": "y" * LONG for n in range(40)}, retry_after_s=1.0)
    status = error.status()
    assert trailer_bytes(status) <= MAX_TRAILER_BYTES
    assert status.message.startswith("not now")


@pytest.mark.parametrize("max_bytes", [3, 4, 5, 64])
def test_clip_never_gives_more_than_it_may(max_bytes: int) -> None:
    for text in ("a" * 100, "é" * 100, "👩" * 100):
        assert len(clip(text, max_bytes).encode()) <= max_bytes
    assert clip("abc", 3) == "abc"
