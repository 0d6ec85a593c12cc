"""Say which faster forms this process can use."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import structlog
import torch
from torch import Tensor

from maniple_kernels.kept_code import keep_compiled

LANES = 16  # of cpu/simd.py: sizes that are walked by lanes must be multiples


class _OnHost:
    interpreted = False  # kernels for GPUs take tensors of the host


_on_host = _OnHost()


def cache_directory() -> Path:
    """Return where this user keeps what was compiled and measured.

    Read from the environment here and not in a service's configuration, since kernels import nothing of ours.
    """
    return Path(os.environ.get("MANIPLE_CACHE") or "~/.cache/maniple").expanduser()


@functools.cache
def package_digest() -> str:
    """Return a digest of the source of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiled_directory() -> Path:
    """Return where the kernels of this package lie that numba has compiled."""
    return cache_directory() / "numba" / f"{importlib.metadata.version('numba')}-{package_digest()}"


_setting_up = threading.Lock()


@functools.cache
def has_cpu_kernels() -> bool:
    """Set numba up and say whether the kernels in ``cpu/`` can be used.

    Compiled code is kept in the user's cache directory, under a digest of this package: numba looks only at the file of
    the function itself and would not notice a change of what it calls.
    """
    with _setting_up:  # two threads that ask for the first time must not both do it
        return _set_up()


@functools.cache
def _set_up() -> bool:
    try:
        numba = importlib.import_module("numba")
        # Needs the system's OpenMP library. numba's own "workqueue" is no way out: it ends the process when two threads
        # use it at once.
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    numba.config.THREADING_LAYER = "omp"
    keep_compiled(compiled_directory())
    return True


def fits_cpu_kernels(tensor: Tensor, *sizes: int) -> bool:
    """Say whether ``tensor`` and the sizes that are walked by lanes suit the kernels in ``cpu/``.

    What torch compiles takes the reference, which it can see into.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and tensor.device.type == "cpu"
        and not _on_host.interpreted
        and tensor.dtype in (torch.float32, torch.bfloat16)
        and all(size % LANES == 0 for size in sizes)
        and has_cpu_kernels()
    )


@functools.cache
def has_gpu_kernels() -> bool:
    """Say whether the kernels in ``gpu/`` can be used: whether Triton is there."""
    return importlib.util.find_spec("triton") is not None


def fits_gpu_kernels(tensor: Tensor) -> bool:
    """Say whether ``tensor`` suits the kernels in ``gpu/``; not where torch compiles."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return (tensor.is_cuda and has_gpu_kernels()) or _on_host.interpreted


@contextlib.contextmanager
def gpu_kernels_interpreted() -> Iterator[None]:
    """Have launchers take the kernels in ``gpu/`` for tensors of the host, through Triton's interpreter.

    Slow: it shows that kernels are right, not that they are fast. TRITON_INTERPRET=1 must be set before Triton is
    imported.
    """
    _on_host.interpreted = True
    try:
        yield
    finally:
        _on_host.interpreted = False


def note_reference(operation: str, device: torch.device, dtype: torch.dtype) -> None:
    """Say once that an operation runs as plain torch, since no kernel fits. Slower, and as right as any."""
    if not torch.compiler.is_dynamo_compiling():
        _note_reference(operation, device, dtype)


@functools.cache
def _note_reference(operation: str, device: torch.device, dtype: torch.dtype) -> None:
    structlog.get_logger("maniple").info(
        "kernel.fell_back", operation=operation, device=device.type, dtype=str(dtype).removeprefix("torch.")
    )
