"""Converting GGUF files: weights to the bit, ids as llama.cpp gives them, whole directories or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from service_chassis.errors import InvalidParameter
from support.demo_model import demo_directory
from support.runner_driver import RunnerDriver
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from support.tiny_gguf import write_gguf
from worker_service.models.gguf_convert import convert

MODELS = {
    "llama": tiny_config("LlamaForCausalLM", tie_word_embeddings=True),
    "qwen2": tiny_config("Qwen2ForCausalLM"),
    "qwen3": tiny_config("Qwen3ForCausalLM"),
}
CONFIG = MODELS["llama"]

# From llama.cpp's own tokenizer on the demo model's GGUF file (POST /tokenize of its server, special tokens parsed).
# Of 315 texts, all gave the same ids here; transformers' GGUF loading differs on 24, where digits follow white space.
LLAMA_CPP_IDS: dict[str, list[int]] = {
    "Hello world": [19556, 905],
    "  two  spaces\n\nand\tlines": [216, 827, 216, 5600, 198, 198, 397, 197, 5110],
    "12345 67,890.12": [33, 34, 35, 36, 37, 216, 38, 39, 28, 40, 41, 32, 30, 33, 34],
    "x\n\n12": [104, 1116, 33, 34],
    " \n \n 1": [3717, 3717, 216, 33],
    "🙂🎉 emoji": [10813, 38887, 10813, 232, 227, 649, 33777],
    "naïve café Ünïcödé 你好 мир": [
        3546, 46494, 37366, 5549, 246, 94, 25972, 83, 7466, 84, 2756, 216, 18645, 250, 48392, 138, 41337, 7872, 9175
    ],
    "def f(x):\n    return x**2 # c\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 907, 265, 198],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "don't we'll I'M": [12420, 982, 392, 3060, 339, 23, 61],
    "½ Ⅷ ٣": [16738, 216, 173, 223, 117, 216, 164, 113],
    "\r\n\r\n\tx   ": [18682, 197, 104, 333],
    "http://x.y/z?q=1&b=2": [5031, 1742, 104, 30, 105, 31, 106, 47, 97, 45, 33, 22, 82, 45, 34],
}  # fmt: skip


def quiet(share: float, what: str) -> None:
    assert 0 <= share <= 1
    assert what


def made(tmp_path: Path, config: dict[str, Any] = CONFIG, architecture: str = "llama", **tokenizer: Any) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", config, tiny_tensors(config), architecture=architecture, **tokenizer)


@pytest.mark.parametrize("text", LLAMA_CPP_IDS)
def test_ids_are_llama_cpps(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_directory() / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == LLAMA_CPP_IDS[text]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_demo_model_is_named_and_templated() -> None:
    config = json.loads((demo_directory() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    template = json.loads((demo_directory() / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in template["chat_template"]
    assert template["eos_token"] == "<|im_end|>"
    assert json.loads((demo_directory() / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("architecture", MODELS)
def test_weights_come_back_to_the_bit_and_make_the_same_model(tmp_path: Path, architecture: str) -> None:
    config = MODELS[architecture]
    tensors = tiny_tensors(config)
    convert(made(tmp_path, config, architecture), tmp_path / "converted", quiet)
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16)), name
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "plain", config, rounded)
    prompt = list(range(5, 40))
    outputs = [RunnerDriver(tmp_path / one).generate(0, prompt, 5) for one in ("plain", "converted")]
    assert outputs[0] == outputs[1]


def test_the_tokenizer_of_a_file_is_rebuilt(tmp_path: Path) -> None:
    convert(made(tmp_path, add_bos_token=True), tmp_path / "converted", quiet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    encoded = tokenizer.encode("abc ab12<|end|>")
    assert encoded.tokens == ["<|user|>", "abc", "Ġ", "ab", "1", "2", "<|end|>"]
    assert tokenizer.decode(encoded.ids) == "abc ab12"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "mamba"}, "general.architecture='mamba': must be one of llama, qwen2, qwen3"),
        ({"model": "llama"}, "tokenizer.ggml.model='llama': must be gpt2"),
        ({"pre": "martian"}, "tokenizer.ggml.pre='martian': must be one of"),
    ],
)
def test_what_is_not_known_is_refused_and_leaves_nothing(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    source = made(tmp_path, **change)
    with pytest.raises(InvalidParameter) as caught:
        convert(source, tmp_path / "out" / "converted", quiet)
    assert said in caught.value.message
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def run_module(source: Path, target: Path) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "worker_service.models.gguf_convert", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_as_a_process_it_reports_progress_and_replaces_an_older_directory(tmp_path: Path) -> None:
    target = tmp_path / "out" / "converted"
    target.mkdir(parents=True)
    (target / "config.json").write_text("old")
    code, events = run_module(made(tmp_path), target)
    assert code == 0
    assert events[-1] == {"event": "done", "path": str(target)}
    shares = [event["share"] for event in events[:-1]]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert json.loads((target / "config.json").read_text())["vocab_size"] == CONFIG["vocab_size"]
    assert os.listdir(target.parent) == ["converted"]


@pytest.mark.parametrize("kept", [0, 30, 3000, -500])
def test_a_cut_file_fails_with_a_sentence_and_leaves_nothing(tmp_path: Path, kept: int) -> None:
    source = made(tmp_path)
    os.truncate(source, kept if kept >= 0 else source.stat().st_size + kept)
    code, events = run_module(source, tmp_path / "out" / "converted")
    assert code == 1
    assert events[-1]["event"] == "failed"
    assert "must be a complete GGUF file" in events[-1]["error"]
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
