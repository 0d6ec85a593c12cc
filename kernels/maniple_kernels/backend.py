"""Say which faster forms this process can use."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from pathlib import Path

import torch
from torch import Tensor

LANES = 16  # of cpu/simd.py: sizes that are walked by lanes must be multiples


@functools.cache
def has_cpu_kernels() -> bool:
    """Set numba up and say whether the kernels in ``cpu/`` can be used.

    Compiled code is kept in the user's cache directory, under a digest of this package: numba looks only at the file of
    the function itself and would not notice a change of what it calls. The place is read from the environment here and
    not in a service's configuration, since kernels import nothing of ours.
    """
    try:
        numba = importlib.import_module("numba")
        # Needs the system's OpenMP library. numba's own "workqueue" is no way out: it ends the process when two threads
        # use it at once.
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    root = Path(os.environ.get("MANIPLE_CACHE") or "~/.cache/maniple").expanduser()
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    numba.config.CACHE_DIR = str(root / "numba" / digest.hexdigest()[:16])
    numba.config.THREADING_LAYER = "omp"
    return True


def fits_cpu_kernels(tensor: Tensor, *sizes: int) -> bool:
    """Say whether ``tensor`` and the sizes that are walked by lanes suit the kernels in ``cpu/``."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.bfloat16)
        and all(size % LANES == 0 for size in sizes)
        and has_cpu_kernels()
    )
