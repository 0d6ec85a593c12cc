"""Convert a GGUF file once into the directory that a worker loads.

``python -m worker_service.models.gguf_convert SRC DST [--keep-blocks]``.

The directory holds bfloat16 ``model.safetensors``, ``config.json``, ``tokenizer.json``, ``tokenizer_config.json`` and
``generation_config.json``. With ``--keep-blocks`` weights in blocks of a kind that can be computed with stay as they
are, [outputs, bytes of a row], and ``quantization_config`` in ``config.json`` names them. The directory appears whole
or not at all. Run it as a process of its own: reading the vocabulary holds the GIL for seconds. Standard output carries
one JSON object a line: ``{"event": "progress", "share", "what"}``, then ``{"event": "done", "path"}`` or
``{"event": "failed", "error"}`` with exit code 1.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from service_chassis.errors import InvalidParameter
from worker_service.models.config import BLOCK_KINDS, GGUF_BLOCKS
from worker_service.models.gguf_tokenizer import GgufVocabulary, adds_bos, build_tokenizer
from worker_service.models.safetensors_file import write_safetensors

Report = Callable[[float, str], None]
FloatArray = npt.NDArray[np.float32]
WeightArray = npt.NDArray[np.float32 | np.uint8]

# GGUF architecture -> (transformers class, model_type, whether llama.cpp permuted q and k for its interleaved RoPE)
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQUENCIES = "rope_freqs.weight"


def convert(source: Path, target: Path, report: Report, *, keep_blocks: bool = False) -> None:
    """Convert ``source`` into the directory ``target``; a directory that is there already is replaced.

    Args:
        source: a GGUF file.
        target: a directory.
        report: is told the share that is done, and what comes next.
        keep_blocks: leave weights in blocks of ``BLOCK_KINDS`` as they are.

    Raises:
        InvalidParameter: the file is no GGUF, is damaged, or holds a model or tokenizer that is not supported.
    """
    report(0.0, f"reading {source.name}")
    reader = _open(source)
    fields = _Fields(reader)
    config = _model_config(fields, reader)
    blocks = _blocks_to_keep(reader) if keep_blocks else {}
    if blocks:
        config["quantization_config"] = {"quant_method": GGUF_BLOCKS, "tensors": blocks}
    report(0.2, "building the tokenizer")
    vocabulary = _vocabulary(fields)
    tokenizer = build_tokenizer(vocabulary)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the rename at the end cannot cross file systems.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    try:
        tokenizer.save(str(staging / "tokenizer.json"))
        _write_json(staging / "config.json", config)
        _write_json(staging / "tokenizer_config.json", _tokenizer_config(fields, vocabulary, config))
        _write_json(staging / "generation_config.json", _generation_config(fields))
        _write_weights(staging / "model.safetensors", reader, config, blocks, report)
        staging.chmod(0o755)
        _replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    report(1.0, "converted")


def _replace(staging: Path, target: Path) -> None:
    if target.exists():
        retired = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
        os.replace(target, retired)
        os.replace(staging, target)
        shutil.rmtree(retired)
    else:
        os.replace(staging, target)


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except OSError:
        raise
    except Exception as error:  # the reader trusts the file: damage shows as whatever numpy or struct says
        raise InvalidParameter("gguf", str(source), f"must be a complete GGUF file ({error})") from error


class _Fields:
    """The key-value part of the file."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture", ""))
        if self.architecture not in _ARCHITECTURES:
            raise InvalidParameter(
                "general.architecture", self.architecture, f"must be one of {', '.join(_ARCHITECTURES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def of_model(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.of_model(key)
        if value is None:
            raise InvalidParameter(f"{self.architecture}.{key}", None, "must be in the file")
        return value


def _shortest(value: float) -> float:
    """Return the decimal that someone wrote: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _model_config(fields: _Fields, reader: gguf.GGUFReader) -> dict[str, Any]:
    class_name, model_type, _ = _ARCHITECTURES[fields.architecture]
    num_heads = int(fields.required("attention.head_count"))
    hidden_size = int(fields.required("embedding_length"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(fields.required("feed_forward_length")),
        "num_hidden_layers": int(fields.required("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields.of_model("attention.head_count_kv", num_heads)),
        "head_dim": int(fields.of_model("attention.key_length") or hidden_size // num_heads),
        "max_position_embeddings": int(fields.required("context_length")),
        "rms_norm_eps": _shortest(fields.required("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.of_model("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, tensors.get(_ROPE_FREQUENCIES)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", [])),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }
    return config


def _rope_scaling(fields: _Fields, frequencies: Any) -> dict[str, Any] | None:
    kind = fields.of_model("rope.scaling.type", "none")
    original = fields.of_model("rope.scaling.original_context_length")
    if frequencies is not None:
        return _llama3_scaling(fields, np.asarray(frequencies.data, np.float32))
    if kind == "none":
        return None
    factor = _shortest(fields.required("rope.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original is not None:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
    raise InvalidParameter("rope.scaling.type", kind, "must be none, linear or yarn with its original context length")


def _llama3_scaling(fields: _Fields, divisors: FloatArray) -> dict[str, Any]:
    """Recover Llama 3's scaling from the frequency divisors that llama.cpp stores in its place.

    All released models use the same three numbers; what they give is compared with the file.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = float(fields.of_model("rope.freq_base", 10000.0))
    wavelengths = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    smooth = np.clip((8192 / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / divisors.max() + smooth)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise InvalidParameter(_ROPE_FREQUENCIES, divisors[:4].tolist(), "must be the frequencies of Llama 3's scaling")
    return scaling


def _vocabulary(fields: _Fields) -> GgufVocabulary:
    tokens = fields.get("tokenizer.ggml.tokens", [])
    return GgufVocabulary(
        model=str(fields.get("tokenizer.ggml.model", "")),
        pre=str(fields.get("tokenizer.ggml.pre", "")),
        tokens=tokens,
        token_types=fields.get("tokenizer.ggml.token_type", []),
        merges=fields.get("tokenizer.ggml.merges", []),
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        add_bos_token=fields.get("tokenizer.ggml.add_bos_token"),
    )


def _tokenizer_config(fields: _Fields, vocabulary: GgufVocabulary, config: Mapping[str, Any]) -> dict[str, Any]:
    special = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    result: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(vocabulary),
    }
    for name, key in special.items():
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            result[name] = vocabulary.tokens[token_id]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        result["chat_template"] = template
    return result


def _generation_config(fields: _Fields) -> dict[str, Any]:
    ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    config: dict[str, Any] = {"eos_token_id": unique[0] if len(unique) == 1 else unique}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[name] = token_id
    return config


def _weight_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.partition(".")
    if prefix != "blk" or part not in _IN_LAYER or kind not in ("weight", "bias"):
        raise InvalidParameter("gguf tensor", name, "must be a tensor of a Llama-family model")
    return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"


def _blocks_to_keep(reader: gguf.GGUFReader) -> dict[str, str]:
    """Return which tensors stay in blocks, and of which kind."""
    kinds = {t.name: t.tensor_type.name for t in reader.tensors if t.name != _ROPE_FREQUENCIES}
    return {_weight_name(name): kind for name, kind in kinds.items() if kind in BLOCK_KINDS}


def _write_weights(
    path: Path, reader: gguf.GGUFReader, config: Mapping[str, Any], blocks: Mapping[str, str], report: Report
) -> None:
    tensors = [tensor for tensor in reader.tensors if tensor.name != _ROPE_FREQUENCIES]
    # GGUF lists the fastest dimension first.
    shapes = {_weight_name(t.name): tuple(int(size) for size in reversed(t.shape)) for t in tensors}
    # The reader has the bytes of blocks row by row already.
    shapes |= {name: t.data.shape for t in tensors if (name := _weight_name(t.name)) in blocks}
    permuted = next(p for name, _, p in _ARCHITECTURES.values() if name == config["architectures"][0])

    def values() -> Iterator[tuple[str, WeightArray]]:
        for index, tensor in enumerate(tensors):
            name = _weight_name(tensor.name)
            if index % 16 == 0:
                report(0.3 + 0.7 * index / len(tensors), f"{'copying' if name in blocks else 'dequantizing'} {name}")
            weights = tensor.data if name in blocks else gguf.dequantize(tensor.data, tensor.tensor_type)
            weights = weights.reshape(shapes[name])
            if permuted and ".self_attn.q_proj." in name:
                weights = _unpermute(weights, config["num_attention_heads"])
            elif permuted and ".self_attn.k_proj." in name:
                weights = _unpermute(weights, config["num_key_value_heads"])
            yield name, weights

    write_safetensors(path, shapes, values(), in_bytes=blocks)


def _unpermute(weights: WeightArray, num_heads: int) -> WeightArray:
    """Undo llama.cpp's order of a head's rows: pairs (x0, x_half) side by side become two halves again."""
    half = weights.shape[0] // num_heads // 2
    return weights.reshape(num_heads, half, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def main(arguments: list[str]) -> int:
    """Run as a process; see the module."""
    keep_blocks = "--keep-blocks" in arguments
    paths = [Path(argument) for argument in arguments if argument != "--keep-blocks"]
    if len(paths) != 2:
        print("usage: python -m worker_service.models.gguf_convert SRC DST [--keep-blocks]", file=sys.stderr)
        return 2
    source, target = paths

    def report(share: float, what: str) -> None:
        _say("progress", share=round(share, 3), what=what)

    try:
        convert(source, target, report, keep_blocks=keep_blocks)
    except (InvalidParameter, OSError) as error:
        _say("failed", error=str(error))
        return 1
    _say("done", path=str(target))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
