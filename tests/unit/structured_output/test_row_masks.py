"""Masks of many samples: what is told of them, and when."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.structured_output.mask_rules import MaskRules
from control_plane.structured_output.row_masks import RowMasks


def grammar() -> Any:
    return SimpleNamespace(vocab_size=32, matcher=SimpleNamespace(deep_copy=object))


@pytest.fixture
def rules() -> MaskRules:
    return MaskRules.__new__(MaskRules)  # never read: no walk is moved here


async def test_samples_whose_owner_closes_have_no_fault(monkeypatch: pytest.MonkeyPatch, rules: MaskRules) -> None:
    monkeypatch.setattr(MaskRules, "end_mask", lambda self: b"")
    let_go, faults = threading.Event(), list[tuple[str, str]]()
    masks: RowMasks[str] = RowMasks(lambda: None, lambda key, why: faults.append((key, why)))
    monkeypatch.setattr(masks, "_work", lambda steps: let_go.wait(10))
    for key in ("first", "second"):  # the second waits for the thread
        masks.enter(key, rules)
        masks.begin([(key, ())], grammar())
    masks.close()
    let_go.set()
    await asyncio.sleep(0.05)
    assert faults == []


async def test_a_sample_whose_walk_breaks_has_a_fault(monkeypatch: pytest.MonkeyPatch, rules: MaskRules) -> None:
    monkeypatch.setattr(MaskRules, "end_mask", lambda self: b"")
    told = asyncio.Event()
    faults = list[tuple[str, str]]()

    def note(key: str, why: str) -> None:
        faults.append((key, why))
        told.set()

    def work(steps: object) -> None:
        raise RuntimeError("broken")

    masks: RowMasks[str] = RowMasks(lambda: None, note)
    monkeypatch.setattr(masks, "_work", work)
    masks.enter("only", rules)
    masks.begin([("only", ())], grammar())
    await asyncio.wait_for(told.wait(), 10)
    assert faults == [("only", "cannot be followed any further")]
    masks.close()
