"""Keep what numba compiles for later starts, as far as it can be kept.

What is wrong with the disk costs time and ends nothing: code that cannot be read is compiled again, code that cannot be
written goes with the process. It is kept in one directory or nowhere. numba's other choice is the package's own, where
it looks only at the file of the function itself: after a change elsewhere it would call by an address what was compiled
for other types.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import tempfile
from pathlib import Path
from typing import Any

import structlog


def keep_compiled(directory: Path) -> None:
    """Have numba keep what it compiles in ``directory``; to be called once, before a kernel is imported."""
    caching = importlib.import_module("numba.core.caching")
    importlib.import_module("numba").config.CACHE_DIR = str(directory)
    caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]
    _save_one_at_a_time(caching.IndexDataCacheFile)
    _take_damaged_for_missing(caching.IndexDataCacheFile)
    _go_on_without(caching.Cache, importlib.import_module("numba.core.dispatcher").Dispatcher)


def is_writable(directory: Path) -> bool:
    """Say whether files can be made in the directory, which is made for it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _save_one_at_a_time(cache_file: Any) -> None:
    """Let one process at a time add to a cache: of two at once, one would find its key and the other's code."""
    save = cache_file.save

    def locked_save(self: Any, key: Any, data: Any) -> None:
        with open(Path(self._cache_path) / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save(self, key, data)

    cache_file.save = locked_save


def _take_damaged_for_missing(cache_file: Any) -> None:
    """Files are empty or cut off after a machine lost its power. What reading those raises may be anything."""
    load_index, load_data = cache_file._load_index, cache_file._load_data

    def whole_index(self: Any) -> Any:
        with contextlib.suppress(Exception):
            return load_index(self)
        return {}

    def whole_data(self: Any, name: str) -> Any:
        try:
            return load_data(self, name)
        except Exception as error:
            raise FileNotFoundError(name) from error  # which is a miss

    cache_file._load_index, cache_file._load_data = whole_index, whole_data


def _go_on_without(cache: Any, dispatcher: Any) -> None:
    save_overload, enable_caching = cache.save_overload, dispatcher.enable_caching

    def save_if_possible(self: Any, signature: Any, data: Any) -> None:
        try:
            save_overload(self, signature, data)
        except OSError as error:
            _note_not_kept(str(error))

    def enable_if_possible(self: Any) -> None:
        try:
            enable_caching(self)
        except RuntimeError as error:  # the directory cannot be written
            _note_not_kept(str(error))

    cache.save_overload, dispatcher.enable_caching = save_if_possible, enable_if_possible


_noted: list[str] = []


def _note_not_kept(why: str) -> None:
    """Say so once: what holds for one function holds for a hundred."""
    if not _noted:
        _noted.append(why)
        structlog.get_logger("maniple").warning("kernel.not_kept", why=why)
