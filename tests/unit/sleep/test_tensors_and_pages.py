"""Finding tensors, and giving their pages back on a CPU."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from service_chassis.errors import WrongState
from worker_service.sleep.pages import PagesBackend, whole_pages
from worker_service.sleep.tensors import memory_of, tensors_in

torch.set_num_threads(1)


def resident(span: tuple[int, int]) -> int:
    """Pages of a range that are in memory, by /proc/self/pagemap: bit 63 of an entry of 8 bytes."""
    first, num = span[0] // mmap.PAGESIZE, span[1] // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(first * 8)
        entries = file.read(num * 8)
    return sum(entries[place + 7] >> 7 for place in range(0, len(entries), 8))


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


def test_tensors_are_found_in_whatever_holds_them_and_each_once() -> None:
    one, two, three, four, five = (torch.full((3,), float(number)) for number in range(5))
    holder = Slotted({"a": [one, (two, {"b": three})]})
    holder_of_all: Any = type("Holder", (), {})()
    holder_of_all.parts = [holder, one, nn.Linear(2, 2, bias=False), None, 7, "text", len, torch.empty(0)]
    holder_of_all.again = holder_of_all  # a circle
    holder_of_all.left_out = five
    holder_of_all.buffer = four
    found = tensors_in(holder_of_all, without=[five])
    linear = holder_of_all.parts[2].weight
    assert {id(tensor) for tensor in found} == {id(one), id(two), id(three), id(four), id(linear)}


def test_views_share_their_memory_and_packed_weights_have_one() -> None:
    whole = torch.zeros(100, 64)
    assert memory_of(whole[3:5]) == memory_of(whole) == (whole.data_ptr(), 100 * 64 * 4)
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(256, 512), 32)
    assert memory_of(packed)[1] >= 256 * 512 * 4


def test_pages_that_two_tensors_share_belong_to_neither() -> None:
    size = mmap.PAGESIZE
    pages = mmap.mmap(-1, 8 * size)
    start = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    left = torch.frombuffer(pages, dtype=torch.uint8, count=3 * size + 100)
    right = torch.frombuffer(pages, dtype=torch.uint8, count=4 * size, offset=3 * size + 100)
    assert whole_pages([left]) == [(start, 3 * size)]
    assert whole_pages([right, right]) == [(start + 4 * size, 3 * size)]
    assert whole_pages([torch.zeros(9)]) == []


def test_kept_memory_comes_back_as_it_was_and_dropped_memory_as_zeros(tmp_path: Path) -> None:
    x = torch.randn(5, 700)
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(900, 700), 32)
    plain, cache, scale = torch.randn(900, 700), torch.ones(3, 90001), torch.full((5,), 2.0)
    want = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    copy = plain.clone()
    backend = PagesBackend(str(tmp_path))
    backend.sleep("weights", kept=[packed, plain], dropped=[])
    backend.sleep("kv_cache", kept=[], dropped=[cache, scale])
    assert list(tmp_path.iterdir()) == []  # the file has no name
    for tag, tensors in (("weights", [packed, plain]), ("kv_cache", [cache])):
        spans = whole_pages(tensors)
        assert sum(span.num_bytes for span in spans) == backend.asleep_bytes(tag) > 0
        assert sum(map(resident, spans)) == 0
    for tag in ("kv_cache", "weights", "weights"):  # the last is a repetition
        backend.wake_up(tag)
        assert backend.asleep_bytes(tag) == 0
    assert torch.equal(torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), want)
    assert torch.equal(plain, copy)
    assert not cache.any()
    assert not scale.any()  # though it fills no page


def test_memory_that_was_never_used_is_not_counted_as_given_back() -> None:
    mib = 1 << 20
    pages = torch.frombuffer(mmap.mmap(-1, 90 * mib), dtype=torch.uint8)
    pages[3 * mib : 33 * mib] = 1
    backend = PagesBackend()
    assert backend.sleep("kv_cache", kept=[], dropped=[pages]) == pytest.approx(30 * mib, abs=3 * mib)
    assert backend.asleep_bytes("kv_cache") == 90 * mib


def test_what_is_forgotten_needs_no_file_and_wakes_as_zeros(tmp_path: Path) -> None:
    plain = torch.randn(900, 700)
    backend = PagesBackend(str(tmp_path))
    backend.sleep("weights", kept=[plain], dropped=[])
    for _ in range(2):
        backend.forget("weights")
    assert backend.asleep_bytes("weights")
    backend.wake_up("weights")
    inner = plain.view(-1)[1024:-1024]  # without its edges
    assert not inner.any()


def test_weights_that_find_no_place_stay_where_they_are(tmp_path: Path) -> None:
    plain = torch.randn(900, 700)
    copy = plain.clone()
    backend = PagesBackend(str(tmp_path / "missing"))
    with pytest.raises(WrongState, match=r"2 MiB of weights find no place in .*missing.*see --sleep-directory"):
        backend.sleep("weights", kept=[plain], dropped=[])
    assert torch.equal(plain, copy)
    assert not backend.asleep_bytes("weights")
