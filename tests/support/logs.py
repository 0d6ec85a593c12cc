"""Read what this process logs."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from service_chassis.telemetry import LogFormat, configure_logging


@contextmanager
def captured_log(level: str = "info", log_format: LogFormat = "json", **facts: object) -> Iterator[io.StringIO]:
    """Log as a process of ours does, into a string; afterwards everything is as it was."""
    root = logging.getLogger()
    handlers, root_level, before = root.handlers[:], root.level, structlog.get_config()
    stream = io.StringIO()
    configure_logging(level, log_format, stream=stream, **facts)
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(root_level)
        structlog.configure(**before)
