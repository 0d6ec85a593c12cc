"""Profile this process's event loop with cProfile: doors, scheduler, deltas and text, but no worker.

It costs what it measures: while it runs, a step takes the control plane about twice the time.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import tempfile
from collections.abc import Callable

from service_chassis.errors import InvalidParameter, WrongState
from service_chassis.telemetry import get_logger

log = get_logger()

# How often it is looked whether enough steps were planned.
_LOOK_EVERY_S = 0.02


class Profiler:
    """At most one profile at a time. All methods run on the event loop, which is what is profiled."""

    def __init__(self, directory: str, num_steps: Callable[[], int]) -> None:
        """Take where profiles go (empty: temporary files), and who knows how many steps were planned so far."""
        self._directory = directory
        self._num_steps = num_steps
        self._profile: cProfile.Profile | None = None
        self._path = ""  # of one that ended by itself and was not asked for
        self._counting: asyncio.Task[None] | None = None

    def start(self, num_steps: int) -> None:
        """Begin; after so many steps it ends by itself, with 0 not before ``stop``.

        Raises:
            WrongState: one is under way, here or by another tool.
        """
        if self._profile is not None:
            raise WrongState("a profile is under way: stop it first")
        profile = cProfile.Profile()
        try:
            profile.enable()
        except ValueError as error:
            raise WrongState(f"another tool profiles this process: {error}") from error
        self._profile, self._path = profile, ""
        log.info("profile.started", num_steps=num_steps)
        if num_steps:
            self._counting = asyncio.create_task(self._stop_after(self._num_steps() + num_steps), name="profile")

    async def _stop_after(self, last: int) -> None:
        while self._num_steps() < last:  # noqa: ASYNC110 - no step shall cost more because this might look
            await asyncio.sleep(_LOOK_EVERY_S)
        self._end()
        try:
            self._path = self._write()
        except InvalidParameter as error:
            log.error("profile.lost", reason=error.message)

    def stop(self) -> str:
        """End it, and return where it was written: a file for Python's module pstats.

        Raises:
            WrongState: none was started.
            InvalidParameter: it could not be written; it is lost.
        """
        if self._profile is None and not self._path:
            raise WrongState("no profile was started")
        if self._profile is not None:
            self._end()
            return self._write()
        path, self._path = self._path, ""
        return path

    def _end(self) -> None:
        assert self._profile is not None
        self._profile.disable()
        if self._counting is not None and self._counting is not asyncio.current_task():
            self._counting.cancel()
        self._counting = None

    def _write(self) -> str:
        profile, self._profile = self._profile, None
        assert profile is not None
        try:
            descriptor, path = tempfile.mkstemp(".pstats", "maniple-control-plane-", self._directory or None)
            os.close(descriptor)
            profile.dump_stats(path)
        except OSError as error:
            rule = f"cannot be written to: {error.strerror or error}"
            raise InvalidParameter("profile_directory", self._directory, rule) from error
        log.info("profile.written", path=path)
        return path
