"""What is said of a Ray cluster that does not answer. No Ray is needed for it."""

from __future__ import annotations

import threading

import pytest

from control_plane.executors import ray
from control_plane.executors.base import RankCallError
from control_plane.executors.worker_settings import WorkerSettings


async def test_cluster_that_does_not_answer_is_named_and_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(ray, "connect", lambda address: answers.wait(10))
    executor = ray.RayExecutor(name="x", world_size=1, settings=WorkerSettings(), address="10.0.0.1:6379")
    try:
        with pytest.raises(RankCallError, match=r"no answer from the Ray cluster at '10\.0\.0\.1:6379' within 0\.05 s"):
            await executor.start(timeout_s=0.05)
    finally:
        answers.set()
