"""Make a directory that nobody else can enter, and remove those whose makers were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "maniple-ranks-"
# A socket's path has at most 107 bytes, and our names inside take fewer than 30.
_LONGEST = 107 - 30


class PrivateDirectory:
    """A temporary directory, mode 0700, for sockets. It is locked for as long as its maker lives."""

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) + len(_PREFIX) + 10 > _LONGEST:
            base = Path("/tmp")  # a long TMPDIR would make every socket's path too long
        _sweep(base)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._lock_fd = _lock(self.path)
            if self._lock_fd is not None and self.path.exists():
                return
            # Another sweep found it in the moment before it was locked.

    def remove(self) -> None:
        """Remove it with everything in it. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _sweep(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        try:
            # Whatever its name: what holds anything but sockets was not made here.
            if path.stat(follow_symlinks=False).st_uid != os.getuid() or not all(map(Path.is_socket, path.iterdir())):
                continue
            lock_fd = _lock(path)
        except OSError:  # removed meanwhile, or no directory
            continue
        if lock_fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock_fd)


def _lock(path: Path) -> int | None:
    """Lock a directory and return its descriptor, or None if its maker lives."""
    lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    return lock_fd
