"""Reading config.json: what each architecture means, and every fault at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service_chassis.errors import InvalidParameter
from support.tiny_checkpoints import tiny_config
from worker_service.models.config import LlamaConfig, load_config, parse_config


def parse(raw: dict[str, Any]) -> LlamaConfig:
    faults: list[tuple[str, object, str]] = []
    config = parse_config(raw, faults)
    assert faults == []
    assert config is not None
    return config


def test_defaults_are_those_of_the_architecture() -> None:
    raw = tiny_config("LlamaForCausalLM")
    for field in (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
    ):
        del raw[field]
    config = parse(raw)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (6, 8, 1e-6)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("architecture", "more", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 9}, (0, 0, 0)),
        ("MistralForCausalLM", {"sliding_window": 9}, (9, 9, 9)),
        ("MistralForCausalLM", {"sliding_window": None}, (0, 0, 0)),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, (0, 0, 0)),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (0, 9, 9)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, 0, 9),
        ),
    ],
)
def test_windows_of_layers(architecture: str, more: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse(tiny_config(architecture, **more)).windows == windows


@pytest.mark.parametrize(
    ("architecture", "more", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases(architecture: str, more: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = parse(tiny_config(architecture, **more))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases


def test_all_faults_are_told_at_once_with_field_value_and_rule(tmp_path: Path) -> None:
    wrong = {
        "hidden_size": 0,
        "num_hidden_layers": "three",
        "num_attention_heads": 4,
        "num_key_value_heads": 3,
        "rms_norm_eps": -1.0,
        "hidden_act": "gelu",
        "quantization_config": {"quant_method": "awq"},
        "tie_word_embeddings": "yes",
        "rope_scaling": {"rope_type": "longrope"},
        "partial_rotary_factor": 0.5,
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("LlamaForCausalLM", **wrong)))
    with pytest.raises(InvalidParameter) as caught:
        load_config(tmp_path)
    for part in (
        "config.json",
        "hidden_size=0: must be a whole number, at least 1",
        "num_hidden_layers='three'",
        "num_attention_heads=4: must be a multiple of num_key_value_heads (3)",
        "rms_norm_eps=-1.0: must be a number above 0",
        "hidden_act='gelu': must be silu",
        "quantization_config='awq'",
        "tie_word_embeddings='yes'",
        "rope_scaling.rope_type='longrope'",
        "partial_rotary_factor=0.5",
    ):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "must hold config.json"),
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ('{"architectures": ["GPT2LMHeadModel"]}', "must name one of LlamaForCausalLM, MistralForCausalLM"),
        ("{}", "architectures=None"),
    ],
)
def test_a_directory_without_a_model_we_know_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidParameter) as caught:
        load_config(tmp_path)
    assert said in caught.value.message
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("field", ["num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, "six", True, 10**12])
def test_a_wrong_size_gives_no_second_fault_about_a_value_nobody_gave(field: str, value: object) -> None:
    for head_dim in (8, None):
        faults: list[tuple[str, object, str]] = []
        parse_config(tiny_config("LlamaForCausalLM") | {"head_dim": head_dim, field: value}, faults)
        assert [(fault[0], fault[1]) for fault in faults] == [(field, value)]
