"""Write a small GGUF file as llama.cpp's converter would: its names, and its order of the rows of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from torch import Tensor

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# A byte-level vocabulary needs the spelling of each byte; letters, digits and a space are enough here.
LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ"]


def gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def interleave(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Put row i and row i + half of each head side by side, one pair after the other."""
    heads = rows.reshape(num_heads, -1, *rows.shape[1:])
    half = heads.shape[1] // 2
    pairs = [heads[:, [i, i + half]] for i in range(half)]
    return np.concatenate(pairs, axis=1).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    architecture: str = "llama",
    kinds: Mapping[str, str] | None = None,
    **tokenizer: Any,
) -> Path:
    """Write the model; ``kinds`` names tensors in blocks, ``tokenizer`` replaces values of ``tokenizer.ggml.*``."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    special = ["<|end|>", "<|user|>"]
    tokens = special + LETTERS + ["ab", "abc"]
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(LETTERS) + 2) + [5] * (len(tokens) - len(LETTERS) - 4),
        "merges": ["a b", "ab c"],
        "bos_token_id": 1,
        "eos_token_id": 0,
    } | tokenizer
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(fields["tokens"])
    writer.add_token_types(fields["token_type"])
    writer.add_token_merges(fields["merges"])
    writer.add_bos_token_id(fields["bos_token_id"])
    writer.add_eos_token_id(fields["eos_token_id"])
    if "add_bos_token" in fields:
        writer.add_add_bos_token(fields["add_bos_token"])
    writer.add_chat_template("{{ messages }}")
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = interleave(values, config["num_attention_heads"])
        elif architecture == "llama" and ".k_proj." in name:
            values = interleave(values, config["num_key_value_heads"])
        if kind := (kinds or {}).get(name):
            quantization = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name), gguf.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
