"""Models with weights of 8 and 4 bits: from checkpoints and blocks, on one rank and several; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from maniple_kernels.quantized_linear import GroupedWeights, dequantize
from service_chassis.errors import InvalidParameter
from support.runner_driver import RunnerDriver
from support.thread_ranks import run_ranks
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from support.tiny_gguf import write_gguf
from worker_service.models.config import load_config
from worker_service.models.gguf_convert import convert
from worker_service.models.llama import LlamaModel
from worker_service.models.quantization import Quantization, check_quantization
from worker_service.models.registry import load_model
from worker_service.platforms.cpu import CpuPlatform
from worker_service.runner import LoadOptions

# Parts of three ranks come out in groups of 32: 2 query heads and one KV head of 32, 32 of 96 inner.
SIZES = {"hidden_size": 64, "intermediate_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("LlamaForCausalLM", **SIZES),
    "tied with biases": tiny_config(
        "LlamaForCausalLM", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **SIZES
    ),
}
KINDS = {"int8": gguf.GGMLQuantizationType.Q8_0, "q4": gguf.GGMLQuantizationType.Q4_1}
PROMPTS = [[5, 99, 3, 17, 180, 2, 44], [7] * 33, [200, 1]]


def is_linear(name: str) -> bool:
    return "_proj.weight" in name


def rounded(config: dict[str, Any], quantization: str) -> dict[str, Tensor]:
    """Return weights as llama.cpp rounds them to blocks, which stand for them exactly."""
    tensors = tiny_tensors(config)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            kind = KINDS[quantization] if is_linear(name) else KINDS["int8"]
            tensors[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
    return tensors


def scores(directory: Path, group: Any = None, **options: Any) -> Tensor:
    """Return the scores behind every token of the prompts from the last of their fourth on, and of five more each."""
    driver = RunnerDriver(directory, group=group, **options)
    driver.step(
        {row: len(prompt) for row, prompt in enumerate(PROMPTS)}, new=[driver.enter(*one) for one in enumerate(PROMPTS)]
    )
    for position in range(5):
        for row in range(len(PROMPTS)):
            driver.teacher_force(row, [(37 * position + 11 * row) % 211])
        driver.step(dict.fromkeys(range(len(PROMPTS)), 1))
    return (
        torch.stack([one for row in sorted(driver.logits) for one in driver.logits[row]])
        if driver.logits
        else torch.empty(0)
    )


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_near_those_of_the_dequantized_weights(tmp_path: Path, name: str, quantization: str) -> None:
    directory = write_checkpoint(tmp_path, CONFIGS[name], rounded(CONFIGS[name], quantization))
    want = scores(directory)
    got = scores(directory, quantization=quantization)
    # What is left is the rounding of activations to 8 bits.
    assert distance(got, want) < 0.03
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("quantization", KINDS)
def test_checkpoint_is_rounded_as_llama_cpp_rounds_it(tmp_path: Path, quantization: str) -> None:
    config = CONFIGS["llama"]
    model = loaded(write_checkpoint(tmp_path, config), quantization)
    tensors = tiny_tensors(config)
    for name, got in linears_of(model).items():
        plain = tensors[name]
        kind = KINDS[quantization] if is_linear(name) else KINDS["int8"]
        theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(plain.numpy(), kind), kind))
        # Scales may be rounded one code apart; what is lost is the same.
        assert distance(got, theirs) < 0.02, name
        assert abs(distance(got, plain) - distance(theirs, plain)) < 0.002, name


@pytest.mark.parametrize("quantization", KINDS)
def test_ranks_hold_parts_of_the_same_weights_and_agree(tmp_path: Path, quantization: str) -> None:
    config = CONFIGS["tied with biases"]
    directory = write_checkpoint(tmp_path, config)
    whole = linears_of(loaded(directory, quantization))
    parts = [linears_of(loaded(directory, quantization, rank, 3)) for rank in range(3)]
    for name, want in whole.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat([part[name] for part in parts], dim), want), name
    alone = scores(directory, quantization=quantization)
    first, *others = run_ranks(3, lambda group: scores(directory, group, quantization=quantization))
    assert distance(first, alone) < 0.03  # activations that are rounded the other way
    assert [len(other) for other in others] == [0, 0]


@pytest.mark.parametrize(
    ("kinds", "quantization", "bits"),
    [
        (["Q4_1"], "q4", 4),
        (["Q4_0"], "q4", 4),
        (["Q8_0"], "q4", 8),
        (["Q4_0", "Q4_1"], "q4", 4),
        (["Q4_1", "Q8_0", ""], "q4", 8),  # of several kinds in one product
        (["Q4_1"], "int8", 8),
        (["Q8_0"], "int8", 8),
        ([""], "q4", 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_of_a_gguf_file_stay_as_they_are(
    tmp_path: Path, kinds: list[str], quantization: str, bits: int, ranks: int
) -> None:
    config = CONFIGS["llama"]
    tensors = tiny_tensors(config)
    names = [name for name in tensors if is_linear(name)]
    of = {name: kinds[place % len(kinds)] for place, name in enumerate(names)}
    source = write_gguf(
        tmp_path / "tiny.gguf", config, tensors, kinds={name: kind for name, kind in of.items() if kind}
    )
    convert(source, tmp_path / "blocks", lambda share, what: None, keep_blocks=True)
    models = [loaded(tmp_path / "blocks", quantization, rank, ranks) for rank in range(ranks)]
    parts = [linears_of(model) for model in models]
    for name in names:
        want = tensors[name]
        if of[name]:
            kind = gguf.GGMLQuantizationType[of[name]]
            want = torch.from_numpy(gguf.dequantize(gguf.quantize(want.numpy(), kind), kind))
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        got = torch.cat([part[name] for part in parts], dim)
        is_kept = bool(of[name]) and (bits == 4 or kinds == ["Q8_0"])
        assert torch.equal(got, want) if is_kept else distance(got, want) < (0.1 if bits == 4 else 0.02), name
    gate_up = models[0].layers[0].gate_up.grouped
    assert gate_up is not None
    assert (8 if gate_up.leasts is None else 4) == bits


def test_weight_bytes_are_what_is_kept(tmp_path: Path) -> None:
    config = CONFIGS["tied with biases"]
    directory = write_checkpoint(tmp_path, config)
    sizes = {name: tensor.numel() for name, tensor in tiny_tensors(config).items()}
    linear = sum(size for name, size in sizes.items() if is_linear(name))
    other = sum(size for name, size in sizes.items() if not is_linear(name) and "embed" not in name)
    table = 224 * 64  # 211 ids, in tiles of 16
    for quantization, per_group in (("int8", 34), ("q4", 20)):
        expected = linear // 32 * per_group + table // 32 * 34 + other * 4
        assert loaded(directory, quantization).weight_bytes == expected


@pytest.mark.parametrize(
    ("options", "world_size", "said"),
    [
        ({"quantization": "int4"}, 1, "quantization='int4': must be one of none, int8, q4"),
        (
            {"quantization": "q4", "dtype": "float16"},
            1,
            "computes with activations of float32 or bfloat16, not float16",
        ),
        (
            {"quantization": "q4"},
            2,
            "needs inputs in groups of 32 of each of 2 ranks; not whole are: intermediate size 48",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, options: dict[str, Any], world_size: int, said: str
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    write_checkpoint(tmp_path, CONFIGS["llama"] | heads, {})
    with pytest.raises(InvalidParameter) as caught:
        load_model(LoadOptions(model=str(tmp_path), **options), CpuPlatform(1), 0, world_size, lambda share, what: None)
    assert said in caught.value.message


def test_odd_sizes_other_devices_and_blocks_without_quantization_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", hidden_size=48, intermediate_size=80), {})
    config = load_config(tmp_path)
    cases = [
        (Quantization("int8"), config, "cpu", "not whole are: hidden size 48, intermediate size 80"),
        (Quantization("int8"), config, "cuda", "is for the CPU, not for cuda"),
        (
            Quantization(blocks={"x": "Q4_0"}),
            config,
            "cpu",
            "this directory keeps the blocks of a GGUF file",
        ),
        (
            Quantization("q4"),
            replace(config, hidden_size=64, intermediate_size=64, num_kv_heads=1, head_dim=8, num_heads=8),
            "cpu",
            "multiples of 16",
        ),
    ]
    for quantization, of, device, said in cases:
        with pytest.raises(InvalidParameter, match=said):
            check_quantization(quantization, of, device=torch.device(device), dtype=torch.float32, world_size=1)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"quant_method": "gptq"}, "other quantized checkpoints are not read"),
        ({"quant_method": "gguf_blocks", "tensors": {"x": "Q6_K"}}, "must name Q8_0, Q4_0, Q4_1"),
        ({"quant_method": "gguf_blocks"}, "must name Q8_0, Q4_0, Q4_1"),
    ],
    ids=["gptq", "kind", "nothing"],
)
def test_configuration_of_blocks_is_read_strictly(tmp_path: Path, found: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"quantization_config": found}))
    with pytest.raises(InvalidParameter, match=said):
        load_config(tmp_path)


def test_float16_checkpoint_is_computed_in_bfloat16(tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"torch_dtype": "float16"}
    tensors = {name: tensor.half() for name, tensor in tiny_tensors(config).items()}
    options = LoadOptions(model=str(write_checkpoint(tmp_path, config, tensors)), quantization="int8")
    _, dtype, _ = load_model(options, CpuPlatform(1), 0, 1, lambda share, what: None)
    assert dtype is torch.bfloat16


def loaded(directory: Path, quantization: str, rank: int = 0, world_size: int = 1) -> LlamaModel:
    options = LoadOptions(model=str(directory), quantization=quantization, dtype="float32")
    model, _, _ = load_model(options, CpuPlatform(1), rank, world_size, lambda share, what: None)
    assert isinstance(model, LlamaModel)
    return model


def linears_of(model: LlamaModel) -> dict[str, Tensor]:
    """Return what the weights of a rank stand for, by the names of the checkpoint."""

    def plain(weights: GroupedWeights | None) -> Tensor:
        assert weights is not None
        return dequantize(weights)

    found = {"model.embed_tokens.weight": plain(model.embedding.grouped)}
    if not model.config.tie_word_embeddings:
        found["lm_head.weight"] = plain(model.head.grouped)
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        attention = layer.attention
        dim = attention.head_dim
        sizes = [attention.num_heads * dim, attention.num_kv_heads * dim, attention.num_kv_heads * dim]
        for name, part in zip("qkv", torch.split(plain(attention.qkv.grouped), sizes), strict=True):
            found[f"{prefix}self_attn.{name}_proj.weight"] = part
        found[f"{prefix}self_attn.o_proj.weight"] = plain(attention.output.grouped)
        gates, ups = torch.chunk(plain(layer.gate_up.grouped), 2)
        found |= {f"{prefix}mlp.gate_proj.weight": gates, f"{prefix}mlp.up_proj.weight": ups}
        found[f"{prefix}mlp.down_proj.weight"] = plain(layer.down.grouped)
    return found
