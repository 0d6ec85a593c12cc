"""Every Triton kernel compiles for every architecture without a device, and needs no more than there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import support.triton_interpreter  # noqa: F401  # as the other tests of this process; what compiles is another one
from maniple_kernels.gpu.aot import Compiled, Variant
from maniple_kernels.gpu.shapes import Shape


@pytest.mark.parametrize(
    ("needs", "excess"),
    [
        ({}, ""),
        ({"registers": 128}, ""),
        ({"registers": 136}, "69632 of 65536 registers"),  # of 16 warps
        ({"shared": (163 << 10) + 1}, "166913 of 166912 bytes of shared memory"),
        ({"spilled": 8}, "0 bytes of stack and 8 spilled, by a thread"),
        ({"stack": 16}, "16 bytes of stack and 0 spilled, by a thread"),
    ],
)
def test_what_does_not_fit_a_multiprocessor_is_told(needs: dict[str, int], excess: str) -> None:
    shape = Shape(columns=8192, num_warps=16)
    variant = Variant(name="k", architecture=80, detail="", function=None, types={}, constants={}, shape=shape)
    given = {"registers": 40, "stack": 0, "spilled": 0, "shared": 163 << 10, "duration_s": 0.1} | needs
    assert Compiled(**given).excess(variant) == excess


def test_all_kernels_compile_without_spills(tmp_path: Path) -> None:
    # In a process of its own: what interprets kernels cannot compile them.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "maniple_kernels.gpu.aot"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert told.returncode == 0, told.stdout + told.stderr
    rows = told.stdout.splitlines()[1:]
    kernels = {row.split()[0] for row in rows}
    modules = Path(__file__).parents[3].joinpath("kernels/maniple_kernels/gpu").glob("*.py")
    assert len(kernels) >= sum("@triton.jit" in module.read_text() for module in modules)
    assert {row.split()[1] for row in rows} == {"80", "90", "100"}
    assert len(rows) <= 150
