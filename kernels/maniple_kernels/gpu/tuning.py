"""Try other shapes of the attention kernels on the device at hand, once, and remember which was fastest.

Only at warm-up: a shape that changed while a graph holds the kernel would do nothing, and a step must never wait for a
compiler. What was found is kept in a file for each device and version of the kernels. The table of ``shapes`` wins
unless something is faster by more than the noise of a measurement.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from maniple_kernels.backend import cache_directory, package_digest
from maniple_kernels.gpu.shapes import AttentionKey, Shape, attention_shape, prefer_shape

# What is faster by less is not worth to be different from every other machine.
_WORTH = 0.97
_COLUMNS, _WARPS, _STAGES = (16, 32, 64, 128), (4, 8), (2, 3, 4)

Measure = Callable[[AttentionKey, Shape], float | None]
"""Seconds of one launch; None: it does not compile, or needs more than there is."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of one kernel."""

    key: AttentionKey
    shape: Shape
    seconds: float
    table_seconds: float


def candidates(present: Shape) -> Iterator[Shape]:
    """Yield shapes to try beside ``present``: other keys, warps and stages. Its rows stay, plans rest on them."""
    for columns in _COLUMNS:
        for num_warps in _WARPS:
            for num_stages in _STAGES:
                shape = replace(present, columns=columns, num_warps=num_warps, num_stages=num_stages)
                if shape != present:
                    yield shape


def tune(key: AttentionKey, measure: Measure) -> Tuned:
    """Measure all shapes of a kernel and return the best."""
    present = attention_shape(key.kernel, key.architecture, width=key.width, itemsize=key.itemsize)
    table_seconds = measure(key, present)
    assert table_seconds is not None, f"{key}: the table's own shape must run"
    best, fastest = present, table_seconds * _WORTH
    for shape in candidates(present):
        seconds = measure(key, shape)
        if seconds is not None and seconds < fastest:
            best, fastest = shape, seconds
    return Tuned(key, best, fastest if best is not present else table_seconds, table_seconds)


class TunedShapes:
    """The file of one device. Ranks of a machine that write it at once write the same kind of thing: the last wins."""

    def __init__(self, device_name: str, directory: Path | None = None) -> None:
        """Take the device's name, and the directory that holds the files of all."""
        name = "".join(letter if letter.isalnum() else "-" for letter in device_name)
        self._path = (directory or cache_directory() / "shapes") / f"{name}-{package_digest()}.json"

    def read(self) -> dict[AttentionKey, Shape]:
        """Return what is known. A file that cannot be read is none: what it held is measured again."""
        try:
            content = json.loads(self._path.read_text())
            return {AttentionKey(**entry["key"]): Shape(**entry["shape"]) for entry in content}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def write(self, known: Mapping[AttentionKey, Shape]) -> None:
        """Replace the file, whole or not at all."""
        entries = [{"key": asdict(key), "shape": asdict(shape)} for key, shape in known.items()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(entries, file)
        os.replace(name, self._path)


def prefer_tuned(keys: tuple[AttentionKey, ...], store: TunedShapes, measure: Measure) -> list[Tuned]:
    """Have the kernels launched by tuned shapes from now on; measure those that the file does not know.

    Returns:
        What was measured now.
    """
    known = store.read()
    measured = [tune(key, measure) for key in keys if key not in known]
    known |= {tuned.key: tuned.shape for tuned in measured}
    if measured:
        try:
            store.write(known)
        except OSError as error:  # a cache that may only be read: what was found serves this process
            structlog.get_logger("maniple").warning("shapes.not_kept", reason=str(error))
    for key in keys:
        prefer_shape(key, known[key])
    return measured
