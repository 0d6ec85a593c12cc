"""Log to standard error: JSON on a pipe, colours on a terminal; the standard library's loggers speak the same form.

Nobody waits for whoever reads it: what finds no room is dropped and counted (``lossy_stream``).

Events are literals of the form ``noun.past_verb``, facts are keys. Prompts and outputs are never logged: no caller
passes them, and tracebacks are rendered without local variables.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from service_chassis.lossy_stream import LossyStream, plain_notice

LogFormat = Literal["auto", "json", "console"]
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "console")
MAX_FACT_CHARS = 2000


def configure_logging(
    level: str = "info", log_format: LogFormat = "auto", *, stream: TextIO | None = None, **facts: object
) -> None:
    """Set up logging for this process. The last call wins.

    Args:
        level: one of LOG_LEVELS; per-step lines exist at debug only.
        log_format: "auto" is colours where ``stream`` is a terminal and JSON elsewhere.
        stream: default standard error, so that standard output stays free for what a command answers.
        facts: keys that every line of this process carries, on every thread, such as ``rank``.
    """
    stream = stream or sys.stderr

    def add_facts(logger: object, method: str, event: EventDict) -> EventDict:
        return {**facts, **event}

    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        add_facts,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
        _bounded,
    ]
    final: list[Processor]
    if console:
        plain = structlog.dev.plain_traceback  # the default renderer would print local variables, prompts among them
        final = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    else:
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
    )
    handler = logging.StreamHandler(LossyStream(stream, plain_notice if console else _json_notice))
    handler.setFormatter(formatter)
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Other people's libraries are quieter than we are: their debug lines may hold request bodies.
    root.setLevel(max(number, logging.WARNING))
    grpc_logger = logging.getLogger("grpc._cython.cygrpc")
    if _is_worth_a_line not in grpc_logger.filters:
        grpc_logger.addFilter(_is_worth_a_line)
    for ours in ("maniple", "control_plane", "worker_service", "service_chassis"):
        logging.getLogger(ours).setLevel(number)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *args: logging.getLogger(args[0] if args else "maniple"),
        cache_logger_on_first_use=False,
    )


def _json_notice(num_lines: int) -> str:
    return json.dumps({"level": "warning", "num_lines": num_lines, "event": "log.lines_dropped"})


def _bounded(logger: object, method: str, event: EventDict) -> EventDict:
    """Cut long facts: names and ids are often a peer's own words, and a line must not be as long as a peer likes."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_FACT_CHARS:
            event[key] = f"{value[:MAX_FACT_CHARS]}… ({len(value)} characters)"
    return event


# The call was over when its status was sent: the client went away, or its deadline passed, in the moment before. What a
# handler of ours was refused in such a moment, it hears itself (service_chassis/interceptors.py).
# A header was no text: it is a client's, and may be a token.
# A server that stops cancels the calls that run: what they raise then is no error of theirs.
_NOT_WORTH_A_LINE = {"CancelledError", "ExecuteBatchError", "UnicodeDecodeError"}


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Tell what of grpc's own errors is logged: not those of clients, since an error is for somebody to look at."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ not in _NOT_WORTH_A_LINE


def trace_id_of(traceparent: str) -> str:
    """Return the trace's id in a W3C ``traceparent``, for logs; nothing where there is none."""
    match = re.fullmatch(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?", traceparent)
    return match[1] if match is not None and match[1].strip("0") else ""


def get_logger(**facts: object) -> FilteringBoundLogger:
    """Return a logger that adds ``facts`` to every event."""
    return cast(FilteringBoundLogger, structlog.get_logger("maniple", **facts))
