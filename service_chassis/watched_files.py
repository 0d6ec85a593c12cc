"""Keep what files say up to date: read again when they change, and never worse than the last good version.

Kubernetes replaces a mounted secret by swapping a symlink, others rename a file over another or write into it: all of
them change what ``stat`` says. Nobody watches in the background: whoever wants the value looks, which costs some
microseconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from service_chassis.telemetry import get_logger

log = get_logger()

T = TypeVar("T")

# A reader between two halves of a swap sees files of two versions. Looked at again, they are of one.
_TRIES = 3

_Stamp = tuple[tuple[int, int, int, int] | None, ...]  # of each file; None: it is not there


class WatchedFiles(Generic[T]):
    """One value made of some files. Any thread."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T], *, what: str) -> None:
        """Read them for the first time.

        Args:
            paths: the files.
            read: makes the value of them; an ``OSError`` or ``ValueError`` says why it cannot. Its text is logged.
            what: what they are, for people.
        Raises:
            OSError, ValueError: what ``read`` raised.
        """
        self._paths = tuple(paths)
        self._read = read
        self._what = what
        self._lock = threading.Lock()
        self._generation = 1
        self._stamp, self._value = self._read_one_version()

    def present(self) -> tuple[T, int]:
        """Return the value of now, and a number that grows whenever it changed."""
        with self._lock:
            if self._stamp_of_now() != self._stamp:
                self._look_again()
            return self._value, self._generation

    def _look_again(self) -> None:
        try:
            self._stamp, value = self._read_one_version()
        except (OSError, ValueError) as error:
            self._stamp = self._stamp_of_now()  # said once for each version
            log.error("files.refused", what=self._what, paths=self._paths, reason=str(error), kept="the version before")
            return
        if value != self._value:
            self._value = value
            self._generation += 1
            log.info("files.reloaded", what=self._what, paths=self._paths)

    def _read_one_version(self) -> tuple[_Stamp, T]:
        for last in (False,) * (_TRIES - 1) + (True,):
            before = self._stamp_of_now()
            try:
                value = self._read()
            except (OSError, ValueError):
                if last or self._stamp_of_now() == before:
                    raise
                continue
            if last or self._stamp_of_now() == before:
                return before, value
        raise AssertionError("the last try returns or raises")

    def _stamp_of_now(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
