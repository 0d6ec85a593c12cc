"""Run Triton kernels on the host. Import before the first kernel: what a process compiles it cannot interpret.

The interpreter keeps bfloat16 as integers and multiplies their bits; products are widened here, as kernels widen all
else by themselves.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot = InterpreterBuilder.create_dot


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar is not tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def _create_wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _create_dot(self, _widened(a), _widened(b), *rest)


InterpreterBuilder.create_dot = _create_wide_dot
