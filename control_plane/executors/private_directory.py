"""Make a directory that nobody else can enter, and remove those whose makers were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "maniple-"
_LOCK = "lock"
# A socket's path has at most 107 bytes, and our names inside take fewer than 30.
_LONGEST = 107 - 30


class PrivateDirectory:
    """A temporary directory, mode 0700, for sockets. Its lock is held for as long as its maker lives."""

    def __init__(self) -> None:
        """Make it, and remove those whose makers were killed."""
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) + len(_PREFIX) + 10 > _LONGEST:
            base = Path("/tmp")  # a long TMPDIR would make every socket path too long
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # Locked before it has its name, so that nobody finds it unlocked.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock_fd = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove it with everything in it. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _sweep(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with _trying_lock(path / _LOCK) as is_abandoned:
                if is_abandoned:
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another one swept it, or it is still being made
            continue


@contextmanager
def _trying_lock(path: Path) -> Iterator[bool]:
    lock_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(lock_fd)
