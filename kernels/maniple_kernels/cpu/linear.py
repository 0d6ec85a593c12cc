"""Linear layers on the CPU, panel by panel."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange

from maniple_kernels.cpu.claims import claim, nothing_taken
from maniple_kernels.cpu.panel_products import PANEL, call_multiply_panel
from maniple_kernels.cpu.simd import LANES, add, load, store

ROWS = 64  # whose sums lie in the first-level cache until they are written where they belong


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def multiply_rows(x, num_rows, num_inputs, panels, bias, out, multiply, num_threads):
    """Write x W^T + bias; ``x`` flat [num_rows, num_inputs], ``out`` flat [num_rows, outputs], ``bias`` or empty.

    ``multiply`` is of ``multiply_panel_address``.
    """
    num_panels = len(panels) // (num_inputs * PANEL)
    width = num_panels * PANEL
    taken = nothing_taken(num_threads)
    for thread in prange(num_threads):
        sums = np.empty(ROWS * PANEL, np.float32)
        panel, helped = claim(taken, num_panels, thread, 0)
        while panel < num_panels:
            for first in range(0, num_rows, ROWS):
                count = min(ROWS, num_rows - first)
                start = first * num_inputs
                call_multiply_panel(multiply, (x, start, count, num_inputs, panels, panel, sums, 0, PANEL, True))
                for row in range(count):
                    for i in range(0, PANEL, LANES):
                        value = load(sums, row * PANEL + i)
                        if len(bias):
                            value = add(value, load(bias, panel * PANEL + i))
                        store(out, (first + row) * width + panel * PANEL + i, value)
            panel, helped = claim(taken, num_panels, thread, helped)
