"""Which shape of a kernel is preferred, by pretended timings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from maniple_kernels.gpu import shapes
from maniple_kernels.gpu.shapes import AttentionKey, Shape, attention_shape
from maniple_kernels.gpu.tuning import TunedShapes, candidates, prefer_tuned, tune

DECODE = AttentionKey(kernel="paged_decode", architecture=90, width=128, itemsize=2)
PREFILL = AttentionKey(kernel="paged_prefill", architecture=90, width=128, itemsize=2)


@pytest.fixture(autouse=True)
def _table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_preferred", {})


def shape_for(key: AttentionKey) -> Shape:
    return attention_shape(key.kernel, key.architecture, width=key.width, itemsize=key.itemsize)


class Timer:
    """Pretends that every shape takes a second, but for some."""

    def __init__(self, seconds: dict[Shape, float | None]) -> None:
        self.seconds = seconds
        self.asked: list[tuple[AttentionKey, Shape]] = []

    def __call__(self, key: AttentionKey, shape: Shape) -> float | None:
        self.asked.append((key, shape))
        return self.seconds.get(shape, 1.0)


def test_the_fastest_shape_is_taken_whatever_fails_on_the_way() -> None:
    table = shape_for(DECODE)
    best = replace(table, columns=32, num_warps=4, num_stages=4)
    timer = Timer({best: 0.5, replace(best, num_stages=2): 0.6, replace(best, columns=16): None})
    tuned = tune(DECODE, timer)
    assert (tuned.shape, tuned.seconds, tuned.table_seconds) == (best, 0.5, 1.0)
    assert len(timer.asked) == 4 * 2 * 3  # every shape once; the table's is one of them
    assert len({shape for _, shape in timer.asked}) == len(timer.asked)


def test_rows_are_never_changed() -> None:
    # Tiles are planned on the host by the rows of the table.
    assert {shape.rows for shape in candidates(shape_for(PREFILL))} == {shape_for(PREFILL).rows}


def test_the_table_wins_against_noise() -> None:
    table = shape_for(DECODE)
    tuned = tune(DECODE, Timer({replace(table, num_stages=2): 0.98}))
    assert tuned.shape == table


def test_what_was_measured_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    best = replace(shape_for(DECODE), columns=64, num_warps=4)
    store = TunedShapes("NVIDIA H200", tmp_path)
    assert [one.key for one in prefer_tuned((DECODE,), store, Timer({best: 0.2}))] == [DECODE]
    assert shape_for(DECODE) == best
    assert shape_for(replace(DECODE, itemsize=4)).columns == 32  # others keep the table's

    shapes._preferred.clear()  # another process
    timer = Timer({})
    measured = prefer_tuned((DECODE, PREFILL), TunedShapes("NVIDIA H200", tmp_path), timer)
    assert [one.key for one in measured] == [PREFILL]
    assert {key for key, _ in timer.asked} == {PREFILL}
    assert shape_for(DECODE) == best
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "{", "[{}]", '[{"key": {"kernel": 1}, "shape": {}}]', "7"])
def test_a_file_that_cannot_be_read_is_measured_anew(tmp_path: Path, content: str) -> None:
    store = TunedShapes("NVIDIA H200", tmp_path)
    store.write({})
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert store.read() == {}
    prefer_tuned((DECODE,), store, Timer({}))
    assert store.read() == {DECODE: shape_for(DECODE)}


def test_what_cannot_be_kept_serves_all_the_same(tmp_path: Path) -> None:
    best = replace(shape_for(DECODE), columns=64, num_warps=4)
    (tmp_path / "shapes").touch()
    prefer_tuned((DECODE,), TunedShapes("NVIDIA H200", tmp_path / "shapes"), Timer({best: 0.2}))
    assert shape_for(DECODE) == best


def test_devices_have_files_of_their_own(tmp_path: Path) -> None:
    TunedShapes("NVIDIA H200", tmp_path).write({DECODE: shape_for(DECODE)})
    assert TunedShapes("NVIDIA A100/80GB", tmp_path).read() == {}
