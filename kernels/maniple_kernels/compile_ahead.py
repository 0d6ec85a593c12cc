"""Compile the fused decoder layer by two processes where no start has done it yet: on two cores in half of the time.

A process of its own compiles what layers for many tokens call, from before the weights are read; meanwhile this one
compiles the step of few tokens and what else there is. What is compiled lies in the cache of ``backend``, where each
finds what the other did, and so does every later start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maniple_kernels.backend import compiled_directory, has_cpu_kernels
from maniple_kernels.kept_code import is_writable

_TYPES = {"float32": (torch.float32, np.float32), "bfloat16": (torch.bfloat16, np.uint16)}

Part = tuple[Any, tuple[Any, ...]]  # a function, and arguments of the types that it is called with


def layer_parts(name: str) -> list[Part]:
    """Return what layers for many tokens call, and the sampler: the other process's half, for weights of the type."""
    from maniple_kernels.cpu import decoder_layer
    from maniple_kernels.cpu.argmax import highest_of_rows
    from maniple_kernels.cpu.gumbel import draw_rows
    from maniple_kernels.cpu.paged_attention import attend_tiles
    from maniple_kernels.cpu.tile_attention import attend_many

    own, wide, places = np.zeros(1, _TYPES[name][1]), np.zeros(1, np.float32), np.zeros(1, np.int64)
    table, tables, tiles = np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros((1, 4), np.int64)
    rows = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.uint32), np.zeros(1, np.int32)
    number, norms, shape, address = np.float32(1), (own, own), (1, 1, 1, 1, 1), np.int64(0)
    return [
        (attend_many, (wide, own, own, table, 1, 1, 1, 1, shape, number, 1, own)),
        (attend_tiles, (wide, own, own, tables, tiles, shape, number, 0, own, (address, address), 1)),
        (decoder_layer._place_many, (wide, 1, shape, norms, number, wide, places, places, own, own, 1)),
        (decoder_layer._norm_many, (wide, 1, 1, own, number, own, 1)),
        (decoder_layer._project, (address, own, 1, 1, own, own, wide, 1, 1)),
        (decoder_layer._add_product, (address, own, 1, 1, own, own, wide, 1, 1)),
        (decoder_layer._gate_product, (address, own, 1, 1, own, own, 1, own, 1)),
        (highest_of_rows, (wide, 1, 1, rows[2])),
        (draw_rows, rows),
    ]


def step_parts(name: str) -> list[Part]:
    """Return the other half: all layers for few tokens, what both call, and the head."""
    from maniple_kernels.cpu.decode_layers import go_through, run_decode_layers
    from maniple_kernels.cpu.linear import multiply_rows
    from maniple_kernels.cpu.paged_attention import attend_few
    from maniple_kernels.cpu.panel_products import multiply_panel
    from maniple_kernels.cpu.rms_norm import normalize_rows

    own, wide, places = np.zeros(1, _TYPES[name][1]), np.zeros(1, np.float32), np.zeros(1, np.int64)
    table, tables, tiles = np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros((1, 4), np.int64)
    number, shape, address, memory = np.float32(1), (1, 1, 1, 1, 1), np.int64(0), np.zeros((1, 14, 2), np.int64)
    step: tuple[Any, ...] = 1, 1, memory, places, (wide, wide, wide, own, own), wide, (places, places), tables, tiles
    step += shape, number, number, (address, address), address
    return [
        (attend_few, (wide, own, own, table, 1, 1, 1, 1, shape, number, 1, own)),
        (multiply_panel, (own, 1, 1, 1, own, 1, wide, 1, 1, True)),
        (go_through, (1, (places, places, places), *step, 1)),
        (run_decode_layers, (wide, *step, address, 1)),
        (normalize_rows, (wide, 1, 1, own, number, own)),
        (multiply_rows, (own, 1, 1, own, wide, wide, address, 1)),
    ]


def types_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return numba's types of the arguments."""
    typeof: Callable[[Any], Any] = importlib.import_module("numba").typeof
    return tuple(map(typeof, arguments))


def compile_part(part: Part) -> None:
    """Compile a function for the types of its arguments, or find it in the cache."""
    function, arguments = part
    function.compile(types_of(arguments))


@contextlib.contextmanager
def compiling_ahead(dtype: torch.dtype | None) -> Iterator[Callable[[], None]]:
    """Compile for weights of the type while the block reads them.

    Nothing is done where it was done before, where there are no such kernels, and for None. What fails here is compiled
    where it is first used, and fails there.

    Yields:
        What compiles the rest and waits: to be called when there is nothing else to do, before a layer runs.
    """
    name = str(dtype).removeprefix("torch.")
    if not _is_wanted(name):
        yield lambda: None
        return
    words = [sys.executable, "-m", "maniple_kernels.compile_ahead", name]
    nowhere = subprocess.DEVNULL
    # Its standard input closes when this process ends, however it ends, and so does the other process.
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)

    def finish() -> None:
        for part in step_parts(name):
            compile_part(part)
        process.wait()

    try:
        yield finish
    finally:
        process.kill()
        process.communicate()


def _is_wanted(name: str) -> bool:
    if name not in _TYPES or not has_cpu_kernels():
        return False
    from maniple_kernels.cpu.panel_products import has_products

    if not has_products(bfloat16=name == "bfloat16") or _mark(name).exists():
        return False
    return is_writable(compiled_directory())  # else neither process finds what the other did


def _mark(name: str) -> Path:
    return compiled_directory() / f"layer-{name}"


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Compile this process's half for the type that is named."""
    name = sys.argv[1]
    gc.disable()  # what a compiler makes it keeps, and this process lives for seconds
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if has_cpu_kernels():
        for part in layer_parts(name):
            compile_part(part)
        _mark(name).touch()
    os._exit(0)


if __name__ == "__main__":
    main()
