"""Read and write the tensors of KServe's open inference protocol, as far as text, numbers and switches need them.

A tensor of a request is raw (little endian; a text is its length in four bytes, then its bytes) or typed; answers are
always raw, which every client reads.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from service_chassis.errors import InvalidParameter

# Messages are of an untyped package.
InferRequest = Any
InferResponse = Any

BYTES, BOOL, UINT32, FP32 = "BYTES", "BOOL", "UINT32", "FP32"


def read_inputs(request: InferRequest, types: Mapping[str, str]) -> dict[str, bytes | bool]:
    """Return the one element of each tensor of a request, by name.

    Args:
        request: a ModelInferRequest.
        types: of the tensors that there may be.

    Raises:
        InvalidParameter: a tensor is unknown, of another type, twice there, or has not exactly one element.
    """
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        rule = f"must be as many as the {len(request.inputs)} inputs"
        raise InvalidParameter("raw_input_contents", f"{len(raw)} entries", rule)
    values: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        name, datatype = tensor.name, types.get(tensor.name)
        if datatype is None:
            raise InvalidParameter("inputs.name", name, f"is no input of this model; there are {', '.join(types)}")
        if name in values:
            raise InvalidParameter("inputs.name", name, "must be there once")
        if tensor.datatype != datatype:
            raise InvalidParameter(f"{name}.datatype", tensor.datatype, f"must be {datatype}")
        if len(tensor.shape) > 8 or math.prod(tensor.shape) != 1 or not tensor.shape:
            raise InvalidParameter(f"{name}.shape", list(tensor.shape[:8]), "must be [1]: one request at a time")
        if "shared_memory_region" in tensor.parameters:
            raise InvalidParameter(f"{name}.shared_memory_region", "set", "must be unset: send the contents")
        values[name] = _raw(name, datatype, raw[index]) if raw else _typed(name, datatype, tensor.contents)
    return values


def _raw(name: str, datatype: str, content: bytes) -> bytes | bool:
    if datatype == BOOL:
        if len(content) != 1:
            raise InvalidParameter(name, f"{len(content)} bytes", "must have 1 byte, as a BOOL")
        return content != b"\0"
    if len(content) < 4 or len(content) - 4 != int.from_bytes(content[:4], "little"):
        rule = "must be the length of one text in 4 bytes, little endian, and so many bytes"
        raise InvalidParameter(name, f"{len(content)} bytes", rule)
    return content[4:]


def _typed(name: str, datatype: str, contents: Any) -> bytes | bool:
    field = "bool_contents" if datatype == BOOL else "bytes_contents"
    elements: Sequence[bytes | bool] = getattr(contents, field)
    if len(elements) != 1:
        raise InvalidParameter(f"{name}.{field}", f"{len(elements)} elements", "must be one, or raw_input_contents")
    return elements[0]


def add_texts(response: InferResponse, name: str, texts: Sequence[str]) -> None:
    """Add a tensor of texts to a ModelInferResponse."""
    encoded = [text.encode() for text in texts]
    content = b"".join(struct.pack("<I", len(one)) + one for one in encoded)
    _add(response, name, BYTES, len(texts), content)


def add_counts(response: InferResponse, name: str, counts: Sequence[int]) -> None:
    """Add a tensor of counts to a ModelInferResponse."""
    _add(response, name, UINT32, len(counts), struct.pack(f"<{len(counts)}I", *counts))


def add_floats(response: InferResponse, name: str, values: Sequence[float]) -> None:
    """Add a tensor of numbers to a ModelInferResponse."""
    _add(response, name, FP32, len(values), struct.pack(f"<{len(values)}f", *values))


def _add(response: InferResponse, name: str, datatype: str, length: int, content: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=[length])
    response.raw_output_contents.append(content)
