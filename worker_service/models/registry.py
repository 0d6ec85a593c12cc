"""Find the model of a directory and load it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from maniple_kernels.backend import fits_cpu_kernels
from service_chassis.errors import InvalidParameter
from service_chassis.tensor_parallel import SplitSizes, split_rule
from worker_service.attention.base import KvLayer, StepAttention
from worker_service.models.checkpoint import Entry, Slot, check_checkpoint, read_tensors
from worker_service.models.config import LlamaConfig, is_native, load_config
from worker_service.models.layers import Placement
from worker_service.models.llama import LlamaModel
from worker_service.models.quantization import Quantization, check_quantization
from worker_service.platforms.base import Platform
from worker_service.runner import LoadOptions
from worker_service.tensor_group import TensorGroup

NATIVE, TRANSFORMERS = "native", "transformers"
IMPLEMENTATIONS = ("auto", NATIVE, TRANSFORMERS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


Forward = Callable[[Tensor, Tensor, Tensor, Sequence[KvLayer], StepAttention], Tensor]
"""``Model.forward``, or what was compiled of it."""


class ModelConfig(Protocol):
    """What the runner needs to know, of any model."""

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_position(self) -> int: ...


class Model(Protocol):
    """What the runner calls."""

    records: bool  # graphs can hold ``forward``

    @staticmethod
    def read_config(directory: Path) -> ModelConfig:
        """Read the configuration of another checkpoint. Raises ``InvalidParameter``."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def num_heads(self) -> int:
        """Query heads on this rank."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""

    @property
    def head_dim(self) -> int:
        """Size of one head of keys, and room for one of values."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attention: StepAttention
    ) -> Tensor:
        """Return [num_tokens, hidden_size]; keys and values of the tokens are in the cache afterwards."""

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """Return [num_rows, hidden_size] behind the final norm, what an embedding is pooled from."""

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return [num_rows, vocab_size] float32 on rank 0, which samples; None on the others, which take part.

        Valid until it is called again.
        """


def load_model(
    options: LoadOptions,
    platform: Platform,
    rank: int,
    world_size: int,
    progress: Callable[[float, str], None],
    group: TensorGroup | None = None,
) -> tuple[Model, torch.dtype, int]:
    """Read a model directory: this rank's part.

    Args:
        options: what was asked for.
        platform: where it goes.
        rank: of this process.
        world_size: ranks that share the layers.
        progress: is told how far it is.
        group: connects them; not used before the first forward.

    Returns:
        The model, the type of its weights, and the longest context that will be served.

    Raises:
        InvalidParameter: what was asked cannot be served; the message names everything that is wrong with the
            configuration, or the file and tensor of the checkpoint.
    """
    directory = Path(options.model)
    if not directory.is_dir():
        raise InvalidParameter("model", options.model, "must be a directory where the workers run")
    if implementation_of(options) == TRANSFORMERS:
        return _load_by_transformers(options, directory, platform, rank, world_size, progress, group)
    config = load_config(directory)
    quantization = Quantization(options.quantization, config.blocks)
    name = _own_dtype(config, quantization) if options.dtype == "auto" else options.dtype
    _check_options(options, name, config)
    _check_split(config, world_size)
    check_quantization(quantization, config, device=platform.device, dtype=DTYPES[name], world_size=world_size)
    placement = Placement(
        platform.device,
        DTYPES[name],
        rank,
        world_size,
        options.batch_invariant,
        group or TensorGroup(platform.device),
        quantization,
    )
    if options.batch_invariant:
        _check_invariant(config, placement, options.block_size)
    max_model_len = options.max_model_len or config.max_position
    # A size in the configuration that the files do not have is refused before memory is taken for it.
    shapes = LlamaModel(config, replace(placement, device=torch.device("meta")), 1)
    entries = check_checkpoint(directory, shapes.slots(), ignored=shapes.ignores)
    model = LlamaModel(config, placement, max_model_len)
    _fill(model, entries, progress)
    return model, placement.dtype, max_model_len


def implementation_of(options: LoadOptions) -> str:
    """Return whose code computes a model: ours where we have some, else transformers'.

    Raises:
        InvalidParameter: the directory says of no model which it is.
    """
    if options.model_impl not in IMPLEMENTATIONS:
        raise InvalidParameter("model_impl", options.model_impl, f"must be one of {', '.join(IMPLEMENTATIONS)}")
    if options.model_impl != "auto":
        return options.model_impl
    return NATIVE if is_native(Path(options.model)) or not _has_transformers() else TRANSFORMERS


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _check_options(options: LoadOptions, dtype: str, config: ModelConfig) -> None:
    if dtype not in DTYPES:
        raise InvalidParameter("dtype", dtype, f"must be auto or one of {', '.join(DTYPES)}")
    if options.max_model_len > config.max_position:
        rule = f"must be at most the model's {config.max_position}"
        raise InvalidParameter("max_model_len", options.max_model_len, rule)


def _load_by_transformers(
    options: LoadOptions,
    directory: Path,
    platform: Platform,
    rank: int,
    world_size: int,
    progress: Callable[[float, str], None],
    group: TensorGroup | None,
) -> tuple[Model, torch.dtype, int]:
    """As ``load_model``. transformers is imported here alone: it takes seconds."""
    for name, unset in (("quantization", "none"), ("batch_invariant", False)):
        if (value := getattr(options, name)) != unset:
            raise InvalidParameter(name, value, "is for models of our own code; transformers computes this one")
    progress(0.0, "transformers is imported")
    try:
        from worker_service.models.transformers_config import load_transformers_config
        from worker_service.models.transformers_model import load_transformers_model

        config, own = load_transformers_config(directory)
    except ImportError as error:
        rule = f"needs transformers 5.17 or later: install maniple[transformers] ({error})"
        raise InvalidParameter("model_impl", options.model_impl, rule) from None
    name = config.dtype if options.dtype == "auto" else options.dtype
    _check_options(options, name, config)
    placement = Placement(platform.device, DTYPES[name], rank, world_size, group=group or TensorGroup(platform.device))
    model = load_transformers_model(directory, config, own, placement, progress)
    return model, placement.dtype, options.max_model_len or config.max_position


def _fill(model: LlamaModel, entries: Mapping[str, Entry], progress: Callable[[float, str], None]) -> None:
    total = sum(entry.num_bytes for entry in entries.values())
    done = 0

    def load(slots: Mapping[str, Slot]) -> None:
        nonlocal done
        size = sum(entries[name].num_bytes for name in slots)
        read_tensors(entries, slots, progress=lambda share, what: progress((done + share * size) / total, what))
        done += size

    model.load_in_parts(load)


def _own_dtype(config: LlamaConfig, quantization: Quantization) -> str:
    """Return what ``auto`` is: the checkpoint's type, but no float16 where its weights do not stay as they are."""
    return "bfloat16" if quantization and config.dtype == "float16" else config.dtype


def _check_split(config: LlamaConfig, world_size: int) -> None:
    sizes = SplitSizes(
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, intermediate_size=config.intermediate_size
    )
    if rule := split_rule(sizes, world_size):
        raise InvalidParameter("tensor_parallel_size", world_size, rule)


def _check_invariant(config: LlamaConfig, placement: Placement, block_size: int) -> None:
    if placement.world_size > 1:
        raise InvalidParameter("batch_invariant", True, f"holds on one rank, not on {placement.world_size}")
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim // 2, block_size)
    if not fits_cpu_kernels(placement.empty(0), *sizes):
        rule = (
            "needs the CPU, numba, float32 or bfloat16, and multiples of 16 as hidden size, intermediate size, half of "
            f"the head dimension, and block size; these are {', '.join(map(str, sizes))}"
        )
        raise InvalidParameter("batch_invariant", True, rule)
