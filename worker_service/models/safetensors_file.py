"""Write a safetensors file tensor by tensor, so that memory holds one tensor and not the model.

The format: u64 little-endian length of a JSON header, the header, then the raw tensors at the offsets it names. The
``safetensors`` package can only write a dictionary of everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BFLOAT16_BYTES = 2


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to bfloat16, to nearest even, and return the bits. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, npt.NDArray[np.float32 | np.uint8]]],
    *,
    in_bytes: Container[str] = (),
) -> None:
    """Write ``tensors``, which come in the order of ``shapes``: those ``in_bytes`` as they are, others as bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        kind, size = ("U8", 1) if name in in_bytes else ("BF16", BFLOAT16_BYTES)
        end = offset + math.prod(shape) * size
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start aligned
    expected = iter(shapes)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, values in tensors:
            assert name == next(expected), name
            assert values.shape == shapes[name], name
            if name in in_bytes:
                assert values.dtype == np.uint8, name
                out.write(values.tobytes())
            else:
                out.write(bfloat16_bits(values.astype(np.float32)).astype("<u2").tobytes())
    assert next(expected, None) is None
