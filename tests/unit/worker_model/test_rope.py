"""Rotary frequencies against transformers' own, in both spellings of the configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker_service.models.rope import cosines_and_sines, read_rope

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("spelling", ["4", "5"])
@pytest.mark.parametrize("scaling", CASES.values(), ids=CASES.keys())
def test_cosines_and_sines_are_transformers(scaling: dict[str, Any], spelling: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta, length = 50000.0, 2048
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=length,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    if spelling == "4":
        raw = {"rope_theta": theta, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    else:
        raw = {"rope_parameters": {"rope_theta": theta, **scaling}}
    faults: list[tuple[str, object, str]] = []
    ours = cosines_and_sines(read_rope(raw, 64, length, faults), length)
    assert faults == []
    # transformers repeats each half; a last bit of a frequency is 1e-4 of an angle at the end of the context.
    torch.testing.assert_close(ours, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1), rtol=0, atol=3e-4)


def test_faults_name_the_parameter() -> None:
    faults: list[tuple[str, object, str]] = []
    read_rope({"rope_theta": -1, "rope_scaling": {"type": "linear", "factor": 0}}, 64, 100, faults)
    assert [field for field, _, _ in faults] == ["rope_theta", "rope_scaling.factor"]


def test_per_layer_parameters_are_refused() -> None:
    faults: list[tuple[str, object, str]] = []
    read_rope({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, 64, 100, faults)
    assert [field for field, _, _ in faults] == ["rope_parameters"]
