"""Models of real shapes with random weights, made where they are needed: nothing is downloaded or written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from worker_service.models.config import load_config
from worker_service.models.layers import Placement
from worker_service.models.llama import LlamaModel
from worker_service.models.registry import DTYPES, Model
from worker_service.platforms.base import Platform
from worker_service.runner import LoadOptions
from worker_service.tensor_group import TensorGroup

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Of Llama 3 8B.
SHAPE_8B: dict[str, Any] = _COMMON | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "torch_dtype": "bfloat16",
}
# Its width, and so few layers that a check of something else than speed takes no time.
SHAPE_WIDE: dict[str, Any] = SHAPE_8B | {"num_hidden_layers": 4, "vocab_size": 32_000, "intermediate_size": 8192}
# Sizes that no kernel for the CPU takes: every operation is one of torch's, and can be recorded.
SHAPE_TINY: dict[str, Any] = _COMMON | {
    "vocab_size": 211,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def write_config(directory: Path, shape: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


def make_model(
    options: LoadOptions,
    platform: Platform,
    rank: int,
    world_size: int,
    progress: Callable[[float, str], None],
    group: TensorGroup | None = None,
) -> tuple[Model, torch.dtype, int]:
    """As ``load_model`` of a directory that has a configuration and no weights."""
    config = load_config(Path(options.model))
    dtype = DTYPES[config.dtype if options.dtype == "auto" else options.dtype]
    placement = Placement(platform.device, dtype, rank, world_size, group=group or TensorGroup(platform.device))
    max_model_len = options.max_model_len or config.max_position
    model = LlamaModel(config, placement, max_model_len)
    generator = torch.Generator(platform.device).manual_seed(7)
    for name, slot in model.slots().items():
        if name.endswith("norm.weight"):
            slot.target.fill_(1.0)
        else:
            # Scores come out so far apart that two ways to compute them seldom choose another token.
            slot.target.normal_(0.0, 1.5 * slot.target.shape[-1] ** -0.5, generator=generator)
    model.pack()
    return model, dtype, max_model_len


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """Have runners make the weights of their models."""
    with mock.patch("worker_service.model_runner.load_model", make_model):
        yield
