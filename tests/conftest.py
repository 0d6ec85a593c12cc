"""Settings that must be made before anything imports torch, and what a whole session shares."""

from collections.abc import Iterator

import pytest

from worker_service.platforms.openmp import let_waiting_threads_sleep

let_waiting_threads_sleep()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster that this process is in; started by the first test that asks for it."""
    from support import ray_cluster as cluster

    with cluster.ray_cluster():
        yield
