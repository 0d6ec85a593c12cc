"""Write small random checkpoints as transformers would, without importing it: names and shapes are spelled out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def tiny_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """Return a configuration. Sizes are odd where the kernels allow it: 3 KV heads of 2 query heads each."""
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | overrides


def tiny_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights for a configuration, large enough that no two logits lie close by accident."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    architecture, hidden, inner = config["architectures"][0], config["hidden_size"], config["intermediate_size"]
    query, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    attention_bias = config.get("attention_bias", False)
    qkv_bias = architecture == "Qwen2ForCausalLM" or attention_bias
    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": 1 + random(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        for name, shape in shapes.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(*shape)
            if attention_bias if name == "o" else qkv_bias:
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = random(shape[0])
        if architecture == "Qwen3ForCausalLM":
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = 1 + random(config["head_dim"])
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = random(*shape)
            if config.get("mlp_bias", False):
                tensors[f"{prefix}.mlp.{name}_proj.bias"] = random(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + random(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(config["vocab_size"], hidden)
    return tensors


def write_checkpoint(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None, *, num_files: int = 1
) -> Path:
    """Write a model directory, its tensors dealt out to ``num_files`` files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = tiny_tensors(config) if tensors is None else tensors
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
