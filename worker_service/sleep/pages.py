"""Sleep on a CPU: pages go back to the system, and what is kept of them waits in a file.

The host's memory is this device's own, so there is no other memory that weights could move to: they go to disk, to a
file without a name that is gone with the process. Addresses stay as they are; pages come back with the first write.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torch import Tensor

from service_chassis.errors import WrongState
from worker_service.sleep.backend import Capabilities
from worker_service.sleep.tensors import memory_of

_MADV_DONTNEED = 4
_PIECE_BYTES = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Span(NamedTuple):
    """Whole pages of this process."""

    start: int
    num_bytes: int


@dataclass(slots=True)
class _Asleep:
    """What sleeps of one tag. ``file`` holds the pages of ``kept`` one behind the other."""

    kept: list[Span]
    num_bytes: int
    file: BinaryIO | None
    tensors: list[Tensor] = field(default_factory=list)  # whose memory must not be freed meanwhile


class PagesBackend:
    """A ``SleepBackend``. Memory that fills no whole page stays as it is: it is not worth a sleep."""

    name = "pages"
    capabilities = Capabilities(preserves_communicators=True, preserves_graphs=True, durable=False)

    def __init__(self, directory: str = "") -> None:
        """Keep weights in files in ``directory``; empty: where the system has its temporary files."""
        self._directory = directory or tempfile.gettempdir()
        self._asleep: dict[str, _Asleep] = {}

    def region(self, tag: str) -> AbstractContextManager[object]:
        return nullcontext()  # every page of the process can be given back

    def sleep(self, tag: str, *, kept: Sequence[Tensor], dropped: Sequence[Tensor]) -> int:
        assert tag not in self._asleep, f"{tag} sleeps already"
        keep = whole_pages(kept)
        # A page that two tensors share is no whole page of either, so the two sets have none in common.
        drop = whole_pages(dropped)
        file = self._write(keep) if keep else None
        _zero_edges(dropped)
        before = _resident_bytes()
        for span in (*keep, *drop):
            _give_back(span)
        freed_bytes = max(0, before - _resident_bytes())  # blocks of a cache that were never used took none
        trim_heap()
        num_bytes = sum(span.num_bytes for span in (*keep, *drop))
        self._asleep[tag] = _Asleep(keep, num_bytes, file, [*kept, *dropped])
        return freed_bytes

    def wake_up(self, tag: str) -> None:
        asleep = self._asleep.get(tag)
        if asleep is None:
            return
        if asleep.file is not None:
            _read(asleep.file, asleep.kept)
        self.forget(tag)
        del self._asleep[tag]

    def forget(self, tag: str) -> None:
        asleep = self._asleep.get(tag)
        if asleep is not None and asleep.file is not None:
            asleep.file.close()
            asleep.file = None

    def asleep_bytes(self, tag: str) -> int:
        asleep = self._asleep.get(tag)
        return asleep.num_bytes if asleep is not None else 0

    def _write(self, spans: Sequence[Span]) -> BinaryIO:
        file: BinaryIO | None = None
        try:
            file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - it is kept until the wake
            os.posix_fallocate(file.fileno(), 0, sum(span.num_bytes for span in spans))  # a full disk is told at once
            offset = 0
            for address, size in _pieces(spans):
                written = 0
                while written < size:
                    rest = (ctypes.c_char * (size - written)).from_address(address + written)
                    written += os.pwrite(file.fileno(), rest, offset + written)
                offset += size
        except OSError as error:
            if file is not None:
                file.close()
            needed = sum(span.num_bytes for span in spans) / (1 << 20)
            rule = f"{needed:.0f} MiB of weights find no place in {self._directory}: {error.strerror or error}"
            raise WrongState(f"{rule}; see --sleep-directory") from None
        return file


def whole_pages(tensors: Iterable[Tensor]) -> list[Span]:
    """Return the pages that hold nothing but the memory of these tensors, each once."""
    size = mmap.PAGESIZE
    spans = set()
    for start, num_bytes in {memory_of(tensor) for tensor in tensors}:
        first, end = -(-start // size) * size, (start + num_bytes) // size * size
        if end > first:
            spans.add(Span(first, end - first))
    return sorted(spans)


def _zero_edges(tensors: Iterable[Tensor]) -> None:
    """Overwrite what lies before the first and behind the last whole page: all of a small tensor."""
    size = mmap.PAGESIZE
    for start, num_bytes in {memory_of(tensor) for tensor in tensors}:
        end = start + num_bytes
        first, last = min(-(-start // size) * size, end), max(end // size * size, start)
        if last <= first:
            ctypes.memset(start, 0, num_bytes)
        else:
            ctypes.memset(start, 0, first - start)
            ctypes.memset(last, 0, end - last)


def trim_heap() -> None:
    """Give what was freed back to the system: the allocator of the C library keeps it for itself."""
    trim = getattr(_libc, "malloc_trim", None)  # GNU's
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _give_back(span: Span) -> None:
    address, size = ctypes.c_void_p(span.start), ctypes.c_size_t(span.num_bytes)
    if _libc.madvise(address, size, _MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"madvise: {os.strerror(code)}")


def _read(file: BinaryIO, spans: Sequence[Span]) -> None:
    offset = 0
    for address, size in _pieces(spans):
        read = 0
        while read < size:
            rest = (ctypes.c_char * (size - read)).from_address(address + read)
            count = os.preadv(file.fileno(), [rest], offset + read)
            if not count:
                raise OSError(f"the file with the sleeping weights ends at byte {offset + read}")
            read += count
        offset += size


def _pieces(spans: Sequence[Span]) -> Iterable[tuple[int, int]]:
    for span in spans:
        for start in range(0, span.num_bytes, _PIECE_BYTES):
            yield span.start + start, min(_PIECE_BYTES, span.num_bytes - start)
