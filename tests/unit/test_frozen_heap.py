"""What was loaded is not walked again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from service_chassis.frozen_heap import freeze_heap


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_lives_is_frozen_and_what_comes_later_is_collected() -> None:
    loaded = Node()
    frozen = freeze_heap()
    assert frozen > 1000
    assert not any(one is loaded for one in gc.get_objects())
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None


def test_more_can_be_frozen_later() -> None:
    freeze_heap()
    later = Node()
    freeze_heap()
    assert not any(one is later for one in gc.get_objects())
