"""Settings that must be made before anything imports torch, and what a whole session shares."""

import os
from collections.abc import Iterator

import pytest

# Several test processes share the cores: a thread that waits must not hold one. Child processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster that this process is in; started by the first test that asks for it."""
    from support import ray_cluster as cluster

    with cluster.ray_cluster():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs Ray first, one after another: with pytest-xdist one process alone then starts a cluster."""
    items.sort(key=lambda item: not _needs_ray(item))


def _needs_ray(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return "ray_cluster" in getattr(item, "fixturenames", ()) or (
        callspec is not None and callspec.params.get("kind") == "ray"
    )
