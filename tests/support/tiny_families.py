"""Small random checkpoints of model families, made and computed by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Kind of model -> what its configuration says besides; windows are shorter than prompts, head sizes odd where they can.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, **_MOE},
    "gemma2": {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 24, "sliding_window": 6},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "phi": {},
    "phi3": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "olmo2": {},
    # Keys wider than values, a weight of a single number, a scale behind the scores.
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        **_MOE,
    },
    "apertus": {},
    "cohere": {},
}


def quiet() -> None:
    """Have transformers say errors alone."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def write_family(directory: Path, kind: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Write a checkpoint; return transformers' model of it, in float32."""
    quiet()
    config = AutoConfig.for_model(kind, **{**_SIZES, **FAMILIES.get(kind, {}), **overrides})
    torch.manual_seed(seed)
    # The plain form. Of Gemma 2 transformers 5.17 takes one that leaves out the cap of its scores.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.25)  # large enough that no two scores lie close by accident
            elif "norm" not in name and "ln" not in name:
                weight.normal_(0, 0.1)
    model.save_pretrained(directory)
    return model


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return what transformers' own ``generate`` makes of a prompt."""
    ids = torch.tensor([list(prompt)])
    made = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens
