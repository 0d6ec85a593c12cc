"""What is wrong with the directory of compiled code costs a compilation, and never more."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maniple_kernels.backend import has_cpu_kernels

pytestmark = pytest.mark.skipif(not has_cpu_kernels(), reason="numba or an OpenMP library is missing")

SOURCE = """
from numba import njit

@njit(cache=True)
def triple(x):
    return 3 * x
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Import a module with one compiled function anew, as another process would."""
    import numba

    path = tmp_path / "package" / "tripling.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))

    def anew() -> Any:
        spec = importlib.util.spec_from_file_location("tripling", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.triple

    return anew


def num_hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("share", [0, 0.5, 0.98])
def test_code_is_compiled_again_where_its_file_was_cut_off(
    suffix: str, share: float, load: Callable[[], Any], tmp_path: Path
) -> None:
    assert load()(2) == 6
    whole = load()
    assert whole(2) == 6
    assert num_hits(whole) == 1
    (damaged,) = (tmp_path / "kept").rglob(f"*.{suffix}")
    damaged.write_bytes(damaged.read_bytes()[: int(damaged.stat().st_size * share)])
    again = load()
    assert again(2) == 6
    assert num_hits(again) == 0
    mended = load()
    assert mended(2) == 6
    assert num_hits(mended) == 1


def test_code_that_cannot_be_written_is_used(load: Callable[[], Any], tmp_path: Path) -> None:
    function = load()
    shutil.rmtree(tmp_path / "kept")
    (tmp_path / "kept").write_text("in its place")
    assert function(2) == 6


def test_nothing_is_kept_beside_the_source_where_the_directory_cannot_be_written(
    load: Callable[[], Any], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("in its place")
    assert load()(2) == 6
    assert not [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
