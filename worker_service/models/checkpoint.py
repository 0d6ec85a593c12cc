"""Read a safetensors checkpoint straight into the model's final tensors.

Files are read one after the other and tensor by tensor, into the memory where the weights stay: nothing is mapped, at
most one tensor lies beside the model, and of a tensor that is split a rank reads its own part. Headers of all files are
checked before the first byte of weights is read, so that a missing, cut or foreign file is named, with the tensor,
within milliseconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from service_chassis.errors import InvalidParameter

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = {"U8": torch.uint8}  # of weights that stay quantized
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of the checkpoint goes.

    ``target`` is what this rank keeps: with several ranks one of ``num_parts`` parts of the tensor, cut along
    ``split_dim``. Part i of a dimension of n is [n * i // num_parts, n * (i + 1) // num_parts).
    """

    target: Tensor
    split_dim: int | None = None
    part: int = 0
    num_parts: int = 1
    full_size: int = 0  # of ``split_dim`` in the checkpoint; 0: the parts are of one size

    @property
    def full_shape(self) -> list[int]:
        """The tensor's shape in the checkpoint."""
        shape = list(self.target.shape)
        if self.split_dim is not None:
            shape[self.split_dim] = self.full_size or shape[self.split_dim] * self.num_parts
        return shape

    @property
    def start(self) -> int:
        """Where the part begins in the checkpoint's ``split_dim``."""
        assert self.split_dim is not None
        return self.full_shape[self.split_dim] * self.part // self.num_parts


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file, as its header describes it."""

    path: Path
    kind: str  # F32, BF16, ...; integers and 8-bit floats belong to quantized checkpoints
    shape: list[int]
    start: int  # in the file
    num_bytes: int


def load_checkpoint(
    directory: Path,
    slots: Mapping[str, Slot],
    *,
    ignored: Callable[[str], bool],
    progress: Callable[[float, str], None],
) -> None:
    """Fill every slot from the checkpoint in ``directory``.

    Args:
        directory: holds ``model.safetensors``, or an index and the files it names.
        slots: checkpoint name -> where it goes.
        ignored: says whether a tensor of the checkpoint that has no slot may be left out.
        progress: is told the share that is done, and what comes next.

    Raises:
        InvalidParameter: names the file and the tensor that is missing, cut, of a wrong shape or type, or unknown.
    """
    read_tensors(check_checkpoint(directory, slots, ignored=ignored), slots, progress=progress)


def read_tensors(
    entries: Mapping[str, Entry], slots: Mapping[str, Slot], *, progress: Callable[[float, str], None]
) -> None:
    """Fill slots from what ``check_checkpoint`` found, some or all of those that it compared.

    Raises:
        InvalidParameter: a file was cut meanwhile.
    """
    total = sum(slot.target.numel() for slot in slots.values())
    done = 0
    by_file: dict[Path, list[str]] = {}
    for name in slots:
        by_file.setdefault(entries[name].path, []).append(name)
    for path, names in by_file.items():
        with path.open("rb") as file:
            for name in sorted(names, key=lambda name: entries[name].start):
                progress(done / max(1, total), f"{path.name}: {name}")
                _fill(file, name, entries[name], slots[name])
                done += slots[name].target.numel()


def check_checkpoint(
    directory: Path, slots: Mapping[str, Slot], *, ignored: Callable[[str], bool]
) -> Mapping[str, Entry]:
    """Compare the headers of all files with the slots, whose tensors may be on the meta device, and return them.

    Raises:
        InvalidParameter: as ``load_checkpoint``.
    """
    entries: dict[str, Entry] = {}
    for path in _files(directory):
        entries.update(_read_header(path))
    for name, entry in entries.items():
        if name not in slots and not ignored(name):
            _refuse(entry.path, name, "must be a tensor of this architecture")
    for name, slot in slots.items():
        if name not in entries:
            index = directory / INDEX_FILE
            _refuse(index if index.exists() else directory / SINGLE_FILE, name, "must be in the checkpoint")
        allowed = _BLOCKS if slot.target.dtype is torch.uint8 else _DTYPES
        if entries[name].kind not in allowed:
            _refuse(entries[name].path, name, f"must be of type {', '.join(allowed)}, not {entries[name].kind}")
        if entries[name].shape != slot.full_shape:
            rule = f"must have shape {slot.full_shape}, as config.json says, not {entries[name].shape}"
            _refuse(entries[name].path, name, rule)
    return entries


def stored_types(directory: Path) -> dict[str, str]:
    """Return the type in which a checkpoint stores each of its tensors: F32, BF16, ... Raises ``InvalidParameter``."""
    return {name: entry.kind for path in _files(directory) for name, entry in _read_header(path).items()}


def _refuse(path: Path, tensor: str, rule: str) -> NoReturn:
    _refuse_file(path, f"tensor {tensor} {rule}")


def _refuse_file(path: Path, rule: str) -> NoReturn:
    # The file is told in the rule: whoever reports this may know the value only as the model that was asked for.
    raise InvalidParameter("checkpoint", str(path.parent), f"{path.name}: {rule}")


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / SINGLE_FILE
        if not single.exists():
            raise InvalidParameter("checkpoint", str(directory), f"must hold {SINGLE_FILE} or {INDEX_FILE}")
        return [single]
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {name: str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse_file(index, f"must be JSON with a weight_map ({error!r})")
    for tensor, file in names.items():
        if not (directory / file).exists():
            _refuse(directory / file, tensor, "is said to be in this file, which does not exist")
    return [directory / file for file in sorted(set(names.values()))]


def _read_header(path: Path) -> dict[str, Entry]:
    """Return what the file holds, after a check that it is all there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            if size < 8 or 2 <= length <= _LONGEST_HEADER:
                _refuse_file(path, f"is cut off: it has {size} bytes, which do not hold its header")
            _refuse_file(path, f"must be safetensors; a header of {length} bytes?")
        try:
            header = json.loads(file.read(length))
            entries = {name: _entry(path, 8 + length, one) for name, one in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _refuse_file(path, f"must be safetensors; bad header ({error!r})")
    for name, entry in entries.items():
        if entry.start + entry.num_bytes > size:
            _refuse(path, name, f"ends at byte {entry.start + entry.num_bytes}, the file at {size}: it is cut off")
        dtype = (_DTYPES | _BLOCKS).get(entry.kind)
        if dtype is not None and entry.num_bytes != math.prod(entry.shape) * dtype.itemsize:
            _refuse(path, name, f"has {entry.num_bytes} bytes, which does not fit shape {entry.shape}")
    return entries


def _entry(path: Path, data_start: int, described: Mapping[str, Any]) -> Entry:
    begin, end = described["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin}, {end}")
    shape = [int(size) for size in described["shape"]]
    kind = str(described["dtype"])
    return Entry(path, kind, shape, data_start + begin, end - begin)


def _fill(file: BinaryIO, name: str, entry: Entry, slot: Slot) -> None:
    """Read what the slot keeps of a tensor, and nothing else."""
    target, dtype = slot.target, (_DTYPES | _BLOCKS)[entry.kind]
    direct = target.is_contiguous() and target.dtype is dtype and target.device.type == "cpu"
    kept = target if direct else torch.empty(target.shape, dtype=dtype)
    # The file holds rows of ``stride`` bytes each, one for every place in the dimensions before the cut one; of each
    # row the part is one piece.
    buffer = memoryview(kept.reshape(-1).view(torch.uint8).numpy().data)
    if slot.split_dim is None:
        _read_into(file, name, entry, entry.start, buffer)
    else:
        outer = math.prod(entry.shape[: slot.split_dim])
        stride, piece = entry.num_bytes // max(1, outer), len(buffer) // max(1, outer)
        begin = entry.start + stride // max(1, entry.shape[slot.split_dim]) * slot.start
        for row in range(outer):
            _read_into(file, name, entry, begin + row * stride, buffer[row * piece : (row + 1) * piece])
    if not direct:
        target.copy_(kept)


def _read_into(file: BinaryIO, name: str, entry: Entry, start: int, buffer: memoryview) -> None:
    read = 0
    while read < len(buffer):
        count = os.preadv(file.fileno(), [buffer[read:]], start + read)
        if not count:
            at = start + read - entry.start
            _refuse(entry.path, name, f"could be read to byte {at} of {entry.num_bytes}: the file was cut meanwhile")
        read += count
