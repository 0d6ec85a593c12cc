"""What is logged of what grpc reports, and how much of what a peer says."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc

from service_chassis.telemetry import MAX_FACT_CHARS, configure_logging, get_logger


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("info", "json", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def report(error: BaseException) -> None:
    """Log as grpc.aio's server does when a servicer's method ends with something that is not its own."""
    try:
        raise error
    except BaseException:
        logging.getLogger("grpc._cython.cygrpc").exception("raised in core by servicer method [/x/y]")


def test_status_that_grpc_could_not_send_is_no_line(log: io.StringIO) -> None:
    report(cygrpc.ExecuteBatchError("Failed execute_batch"))
    assert log.getvalue() == ""


def test_header_that_is_no_text_is_no_line(log: io.StringIO) -> None:
    report(UnicodeDecodeError("utf-8", b"Bearer \xff", 7, 8, "invalid start byte"))
    assert log.getvalue() == ""


def test_anything_else_that_grpc_reports_is_logged(log: io.StringIO) -> None:
    report(ValueError("surprise"))
    logging.getLogger("grpc._cython.cygrpc").error("no exception at all")
    assert "surprise" in log.getvalue()
    assert "no exception at all" in log.getvalue()


def test_fact_of_any_length_makes_a_line_of_bounded_length(log: io.StringIO) -> None:
    get_logger().warning("group.formed", formation_id="é" * 70_000, rank=1)
    logging.getLogger("other").error("x" * 70_000)
    first, second = log.getvalue().splitlines()
    said = json.loads(first)
    assert said["formation_id"] == "é" * MAX_FACT_CHARS + "… (70000 characters)"
    assert (said["event"], said["rank"]) == ("group.formed", 1)
    assert len(second) < MAX_FACT_CHARS + 300
