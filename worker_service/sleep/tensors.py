"""Find the tensors of a model or a cache, however it holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype, torch.device)


def tensors_in(root: object, *, without: Iterable[object] = ()) -> list[Tensor]:
    """Return every tensor with contents that is reachable through attributes and containers, each once.

    A cache's entry may be a tensor, a list of tensors or an object that holds some: all are found. Views of one memory
    are all in the answer; functions and classes are not looked into.

    Args:
        root: where to begin.
        without: objects that are not looked into.
    """
    found: dict[int, Tensor] = {}
    seen = {id(one) for one in without}
    pending = [root]
    while pending:
        one = pending.pop()
        if isinstance(one, _LEAVES) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            local = getattr(one, "_local_tensor", one)  # of a DTensor: this rank's part
            if local.numel() and local.device.type != "meta":
                found[id(local)] = local
        elif not isinstance(one, Callable) or hasattr(one, "__dict__"):  # type: ignore[arg-type]
            pending.extend(_parts(one))
    return list(found.values())


def _parts(one: object) -> list[Any]:
    if isinstance(one, Mapping):
        return list(one.values())
    if isinstance(one, list | tuple | set | frozenset):
        return list(one)
    attributes = getattr(one, "__dict__", None)
    parts: list[Any] = list(attributes.values()) if isinstance(attributes, Mapping) else []
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            parts.append(getattr(one, name, None))
    return parts


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return (address, bytes) of the whole memory that a tensor is a view of."""
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        # Packed by oneDNN: it has no storage that torch knows of.
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
