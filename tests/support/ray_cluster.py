"""A small Ray cluster on this machine, for as long as a test session needs it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CLUSTER_CPUS = 3  # to Ray a number; a group of two ranks and one of one fit at the same time


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Start a cluster and join it; at the end take it away with everything that it wrote."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else it writes a token into the home directory
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    directory = tempfile.mkdtemp(prefix="mpl-ray-", dir="/tmp")  # short: sockets lie deep inside
    ray.init(
        num_cpus=CLUSTER_CPUS,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        namespace="tests",
        _temp_dir=directory,
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
