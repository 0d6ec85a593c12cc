"""Which numbers of ranks a model's layers can be split over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from control_plane.config import ControlPlaneConfig
from control_plane.model_split import check_split
from service_chassis.errors import ConfigurationError
from service_chassis.tensor_parallel import SplitSizes, split_rule

SMOLLM = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
LLAMA_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}


@pytest.mark.parametrize(
    ("config", "works"),
    [
        (SMOLLM, {1, 3}),
        (LLAMA_8B, {1, 2, 4, 8, 16, 32}),
        ({"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}, {1, 2}),
        ({"num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 100}, {1, 2, 4}),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "intermediate_size": 10}, {1}),
    ],
    ids=["smollm-135m", "llama-8b", "qwen2-0.5b", "no-gqa", "indivisible"],
)
def test_split_works_for_these_sizes_alone(config: dict[str, int], works: set[int]) -> None:
    sizes = SplitSizes(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        intermediate_size=config["intermediate_size"],
    )
    assert {size for size in range(1, 65) if not split_rule(sizes, size)} == works


@pytest.mark.parametrize(
    ("config", "size", "rule"),
    [
        (SMOLLM, 2, "must divide the model's num_attention_heads (9); this model can be split over 1 or 3 ranks"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96},
            3,
            "must divide the model's num_kv_heads (4) or be a multiple of it; "
            "this model can be split over 1, 2, 4 or 12 ranks",
        ),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7, "intermediate_size": 10},
            7,
            "must divide the model's intermediate_size (10); this model can be split over 1 rank",
        ),
    ],
)
def test_split_is_refused_before_anything_is_started(
    tmp_path: Path, config: dict[str, int], size: int, rule: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError) as caught:
        check_split(str(tmp_path), size)
    assert caught.value.faults == [("tensor_parallel_size", size, rule)]
    check_split(str(tmp_path), 1)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"num_attention_heads": "many"}', '{"n_head": 12}'])
def test_configuration_that_says_nothing_is_left_to_the_workers(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    check_split(str(tmp_path), 5)
    check_split("scripted", 5)


def test_batch_invariance_on_several_ranks_is_a_contradiction() -> None:
    with pytest.raises(ConfigurationError, match="holds on one rank: --tensor-parallel-size must be 1"):
        ControlPlaneConfig(model="demo", batch_invariant=True, tensor_parallel_size=3)
    ControlPlaneConfig(model="scripted", batch_invariant=True, tensor_parallel_size=3)
