"""Write events in the format of Chrome's traces, which ui.perfetto.dev and chrome://tracing show, off the event loop.

The file is an array of events, each on a line of its own. Its closing bracket comes with a good end; without one, as
after a crash, viewers take what is there. Events wait in a bounded queue that one thread writes: what it cannot keep up
with is left out and counted, never waited for.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import Any, TextIO

from service_chassis.errors import ConfigurationError
from service_chassis.telemetry import get_logger

log = get_logger()

# Viewers take some hundred megabytes. At 200 steps a second of one rank this is a quarter of an hour.
MAX_TRACE_BYTES = 256 << 20
_MAX_QUEUED = 100_000
_WRITE_EVERY_S = 0.2
# A thread that computes keeps the interpreter from the event loop for up to 5 ms, so it pauses after 0.1 ms.
_EVENTS_AT_ONCE = 16
_PAUSE_S = 0.0005

Event = dict[str, Any]


class TraceFile:
    """One file and the thread that writes it. ``put`` is for one thread, the event loop's."""

    def __init__(self, file: TextIO, *, max_bytes: int = MAX_TRACE_BYTES) -> None:
        """Begin; the file is closed here."""
        self.began_ns = time.monotonic_ns()
        self._file = file
        self._max_bytes = max_bytes
        self._queue: deque[Event] = deque()  # appended to here, popped by the thread
        self._num_left_out = 0
        self._is_over = False  # nothing is written any more
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="trace", daemon=True)
        self._thread.start()

    @classmethod
    def at(cls, path: str) -> TraceFile:
        """Begin a trace at ``path``; what was there before is replaced.

        Raises:
            ConfigurationError: nothing can be written there.
        """
        try:
            file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - the thread closes it
        except OSError as error:
            raise ConfigurationError([("trace", path, f"cannot be written to: {error.strerror}")]) from error
        log.info("trace.opened", path=path)
        return cls(file)

    def put(self, event: Event) -> None:
        """Add an event. Its ``ts`` and ``dur`` are microseconds since ``began_ns``."""
        if len(self._queue) < _MAX_QUEUED and not self._is_over:
            self._queue.append(event)
        else:
            self._num_left_out += 1

    def close(self) -> None:
        """Write what is queued and close the array. Waits for the disk, but not for ever. Safe to call twice."""
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _write_all(self) -> None:
        try:
            with self._file:
                self._write("[\n", "")
                separator, num_bytes = "", 2
                while not (is_last := self._closing.wait(_WRITE_EVERY_S)) or self._queue:
                    while self._queue and num_bytes < self._max_bytes:
                        for _ in range(min(_EVENTS_AT_ONCE, len(self._queue))):
                            if num_bytes >= self._max_bytes:
                                break
                            event = json.dumps(self._queue.popleft(), separators=(",", ":"))
                            num_bytes += self._write(separator, event)
                            separator = ",\n"
                        time.sleep(_PAUSE_S)
                    self._file.flush()
                    if num_bytes >= self._max_bytes:
                        log.warning("trace.full", num_bytes=num_bytes, reason="the rest is left out")
                        break
                    if is_last:
                        break
                self._write("\n]\n", "")
        except OSError as error:
            log.error("trace.failed", reason=error.strerror or str(error))
        self._is_over = True
        self._queue.clear()
        if self._num_left_out:
            log.warning("trace.has_gaps", num_events=self._num_left_out)

    def _write(self, separator: str, text: str) -> int:
        return self._file.write(separator + text)
