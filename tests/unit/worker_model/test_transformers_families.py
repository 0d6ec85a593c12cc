"""Families that transformers computes, on our paged cache: greedy tokens as its own ``generate`` has them.

Several requests at once, of different lengths, prompts in chunks, blocks scattered, windows shorter than prompts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from service_chassis.errors import InvalidParameter
from support.greedy_rule import assert_greedy
from support.runner_driver import RunnerDriver, single_thread
from support.thread_ranks import run_ranks
from support.tiny_families import FAMILIES, greedy, write_family
from worker_service.socket_group import SocketProcessGroup

PROMPTS = [[3 + (7 * row + at * at) % 90 for at in range(size)] for row, size in enumerate((17, 5, 11))]
COUNT = 8
CHUNK = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    single_thread()


def load(directory: Path, **options: Any) -> RunnerDriver:
    return RunnerDriver(directory, **{"max_model_len": 64, "model_impl": "transformers", **options})


def generate_together(driver: RunnerDriver) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    new = [driver.enter(row, prompt) for row, prompt in enumerate(PROMPTS)]
    while any(len(output) < COUNT for output in outputs):
        left = {row: len(state.tokens) - state.num_computed for row, state in driver.rows.items()}
        for row, token in driver.step({row: min(CHUNK, size) for row, size in left.items()}, new=new).items():
            outputs[row].append(token)
        new = []
    return [output[:COUNT] for output in outputs]


@pytest.mark.parametrize("kind", FAMILIES)
def test_family_says_what_generate_says_in_chunks_and_a_crowd(kind: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, kind)
    driver = load(tmp_path)
    assert generate_together(driver) == [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    assert driver.facts.architecture == type(model).__name__
    stored = {one.data_ptr(): one.nbytes for one in (*model.parameters(), *model.buffers()) if one.numel()}
    assert driver.facts.weight_bytes == sum(stored.values())


def test_auto_takes_our_own_code_where_there_is_some(tmp_path: Path) -> None:
    write_family(tmp_path / "llama", "llama")
    write_family(tmp_path / "gpt2", "gpt2")
    models = {kind: load(tmp_path / kind, model_impl="auto").runner._model for kind in ("llama", "gpt2")}
    assert {kind: type(model).__name__ for kind, model in models.items()} == {
        "llama": "LlamaModel",
        "gpt2": "TransformersModel",
    }
    with pytest.raises(InvalidParameter, match=r"must name one of LlamaForCausalLM.*install maniple.transformers"):
        load(tmp_path / "gpt2", model_impl="native")


def test_transformers_is_not_imported_for_models_of_our_own(tmp_path: Path) -> None:
    write_family(tmp_path, "llama")
    program = f"""
import sys
from pathlib import Path
from worker_service.models.registry import load_model
from worker_service.platforms.choose import choose_platform
from worker_service.runner import LoadOptions
platform = choose_platform("cpu", index=0, num_threads=1)
load_model(LoadOptions(model={str(tmp_path)!r}), platform, 0, 1, lambda share, what: None)
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_bfloat16_scores_lie_where_transformers_has_them(tmp_path: Path) -> None:
    model = write_family(tmp_path, "gemma2").to(torch.bfloat16)
    driver = load(tmp_path, dtype="bfloat16")
    driver.generate(0, PROMPTS[0], 1)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    assert float((driver.logits[0][0] - expected).norm() / expected.norm()) < 0.02


# Refused by name


REFUSED = {
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 16}, "GptOssForCausalLM'.*not honoured: s_aux"),
    "falcon": ({}, "FalconForCausalLM'.*once in each layer: 0 times in 2 layers"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "BloomForCausalLM'.*takes no positions of tokens"),
    "mamba": ({}, "MambaForCausalLM'.*keeps a state"),
    "jamba": ({"num_experts": 2}, "JambaForCausalLM'.*keeps a state"),
    "llama4_text": ({"num_local_experts": 2, "head_dim": 16, "attention_chunk_size": 8}, "Llama4ForCausalLM'.*mask"),
    "bert": ({"is_decoder": False}, "BertLMHeadModel'"),
    "diffllama": ({}, "DiffLlamaForCausalLM'.*4 times in 2 layers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_by_name_what_the_cache_does_not_do(kind: str, tmp_path: Path) -> None:
    overrides, sentence = REFUSED[kind]
    write_family(tmp_path, kind, **overrides)
    with pytest.raises(InvalidParameter, match=sentence):
        load(tmp_path, model_impl="auto")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "model_type is 'own'; its own code in auto_map"),
        ({"architectures": ["GPT2Model"]}, "GPT2Model: must be the causal language model of its kind"),
        ({"quantization_config": {"quant_method": "awq"}}, "must not be quantized"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration: must be"),
        ({"is_encoder_decoder": True}, "has an encoder, too"),
        ({"n_embd": 49}, "GPT2LMHeadModel'.*cannot be built"),
    ],
)
def test_refuses_configurations_by_what_is_wrong(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InvalidParameter, match=sentence):
        load(tmp_path)


def test_runs_no_code_that_a_directory_brings(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    own = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("option", "value"), [("quantization", "int8"), ("batch_invariant", True)])
def test_refuses_options_of_our_own_code(option: str, value: object, tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    with pytest.raises(InvalidParameter, match=f"{option}.*is for models of our own code"):
        load(tmp_path, **{option: value})


def test_names_tensors_that_are_missing_foreign_or_of_another_shape(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_family(tmp_path, "mixtral")
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    expert = next(name for name in whole if "experts.3.w2" in name)
    norm = "model.norm.weight"
    for changed, sentence in (
        ({name: one for name, one in whole.items() if name != norm}, f"{norm} must be in the checkpoint"),
        ({name: one for name, one in whole.items() if name != expert}, "experts.down_proj must be in the checkpoint"),
        (whole | {"model.extra": torch.zeros(1)}, "model.extra must be a tensor of this architecture"),
        (whole | {norm: torch.zeros(3)}, rf"{norm} must have shape \[48\]"),
    ):
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(InvalidParameter, match=f"model.safetensors: tensor .*{sentence}"):
            load(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidParameter, match="it is cut off"):
        load(tmp_path)


def test_serves_longrope_as_far_as_its_rotation_stays_the_same(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    rope |= {"original_max_position_embeddings": 32}
    model = write_family(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32)
    with pytest.raises(InvalidParameter, match="max_model_len=64: must be at most the model's 32"):
        load(tmp_path)
    driver = load(tmp_path, max_model_len=32)
    assert driver.facts.max_position == 32
    assert generate_together(driver) == [greedy(model, prompt, COUNT) for prompt in PROMPTS]


# Several ranks


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe", "gemma2", "gpt_neox", "phi3", "olmo2"])
def test_two_ranks_say_what_generate_says(kind: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, kind)

    def body(group: SocketProcessGroup) -> tuple[list[list[int]], int, int]:
        driver = load(tmp_path, group=group)
        loaded = driver.runner._model
        assert loaded is not None
        return generate_together(driver), loaded.weight_bytes, loaded.num_kv_heads

    first, second = run_ranks(2, body)
    assert first == second
    assert_greedy(model, list(zip(PROMPTS, first[0], strict=True)))
    whole = load(tmp_path).facts.weight_bytes
    assert first[1] < 0.85 * whole
    assert first[2] == (2 if kind in ("phi3", "olmo2") else 1 if kind != "gpt_neox" else 2)


@pytest.mark.parametrize(
    ("kind", "overrides", "sentence"),
    [
        ("gpt2", {}, "transformers has no plan to split GPT2LMHeadModel"),
        ("opt", {}, "transformers has no plan to split OPTForCausalLM"),
        ("gemma2", {"num_attention_heads": 6, "hidden_size": 48}, r"must divide the model's num_key_value_heads \(2\)"),
    ],
)
def test_refuses_a_split_before_the_weights(kind: str, overrides: Any, sentence: str, tmp_path: Path) -> None:
    write_family(tmp_path, kind, **overrides)

    def body(group: SocketProcessGroup) -> None:
        load(tmp_path, group=group)

    with pytest.raises(InvalidParameter, match=sentence):
        run_ranks(3 if overrides else 2, body)
