"""Read ``config.json`` of a Llama-family model: every fault at once, each with field, value and rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service_chassis.errors import InvalidParameter
from worker_service.models.rope import RopeConfig, read_rope

Fault = tuple[str, object, str]  # field, value, rule

# Far above any model; sizes of tensors that are products of these can still be computed.
_LARGEST = 2**24
_MOST_HEADS = 2**16
_MOST_LAYERS = 2**12


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What the native model needs to know. Names as in transformers' configurations."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # per layer: keys a token sees, 0 is all
    dtype: str  # of the checkpoint, as its configuration says
    blocks: Mapping[str, str] = field(default_factory=dict)  # tensor -> kind of the GGUF blocks that it is kept in


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an architecture fixes."""

    qkv_bias: bool | None = None  # None: as `attention_bias` says
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    window: str = "none"  # none, always (`sliding_window` holds), switched (`use_sliding_window`)


_OTHERS = "; others are served by transformers: see --model-impl, and install maniple[transformers]"
GGUF_BLOCKS = "gguf_blocks"  # quant_method of a directory that keeps the blocks of a GGUF file
BLOCK_KINDS = ("Q8_0", "Q4_0", "Q4_1")

ARCHITECTURES: Mapping[str, _Traits] = {
    "LlamaForCausalLM": _Traits(mlp_bias=None),
    "MistralForCausalLM": _Traits(qkv_bias=False, output_bias=False, window="always"),
    "Qwen2ForCausalLM": _Traits(qkv_bias=True, output_bias=False, window="switched"),
    "Qwen3ForCausalLM": _Traits(qk_norm=True, window="switched"),
}


def is_native(directory: Path) -> bool:
    """Say whether the model of a directory is one of ours, or none that can be read."""
    try:
        names = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return True  # ``load_config`` says what is wrong
    return not isinstance(names, list) or not names or str(names[0]) in ARCHITECTURES


def load_config(directory: Path) -> LlamaConfig:
    """Read the configuration of a model directory.

    Raises:
        InvalidParameter: the directory holds no model that is supported; the message says everything that is wrong.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameter("model", str(directory), f"must hold config.json ({error.strerror})") from None
    except ValueError as error:
        raise InvalidParameter("model", str(path), f"config.json must be JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidParameter("model", str(path), "config.json must be a JSON object")
    faults: list[Fault] = []
    config = parse_config(raw, faults)
    if config is None or faults:
        text = "; ".join(f"{field}={value!r}: {rule}" for field, value, rule in faults)
        raise InvalidParameter("model", str(path), f"config.json cannot be served: {text}")
    return config


def parse_config(raw: Mapping[str, Any], faults: list[Fault]) -> LlamaConfig | None:
    """Return what the configuration says; add whatever is wrong to ``faults``."""
    names = raw.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture not in ARCHITECTURES:
        faults.append(("architectures", names, f"must name one of {', '.join(ARCHITECTURES)}{_OTHERS}"))
        return None
    traits = ARCHITECTURES[architecture]
    fields = _Reader(raw, faults)
    _check_unsupported(raw, faults)
    hidden_size = fields.whole("hidden_size")
    num_heads = fields.whole("num_attention_heads", most=_MOST_HEADS)
    num_kv_heads = fields.whole("num_key_value_heads", default=num_heads, most=_MOST_HEADS)
    num_layers = fields.whole("num_hidden_layers", most=_MOST_LAYERS)
    max_position = fields.whole("max_position_embeddings", most=2**31 - 1)
    # A rule about two values says nothing where one of them was refused.
    if num_heads % num_kv_heads and fields.are_right("num_attention_heads", "num_key_value_heads"):
        faults.append(("num_attention_heads", num_heads, f"must be a multiple of num_key_value_heads ({num_kv_heads})"))
    given = fields.are_right("hidden_size", "num_attention_heads")
    if raw.get("head_dim") is None and hidden_size % num_heads and given:
        faults.append(("hidden_size", hidden_size, f"must be a multiple of num_attention_heads ({num_heads})"))
    head_dim = fields.whole("head_dim", default=max(1, hidden_size // num_heads), most=_MOST_HEADS)
    if head_dim % 2 and fields.are_right("head_dim") and (given or raw.get("head_dim") is not None):
        faults.append(("head_dim", head_dim, "must be even, for rotary embedding"))
    attention_bias = fields.boolean("attention_bias")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size", most=2**31 - 1),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=read_rope(raw, head_dim, max_position, faults),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
        output_bias=attention_bias if traits.output_bias is None else traits.output_bias,
        mlp_bias=fields.boolean("mlp_bias") if traits.mlp_bias is None else traits.mlp_bias,
        qk_norm=traits.qk_norm,
        windows=_windows(raw, traits, num_layers, fields),
        blocks=_blocks(raw, faults),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _check_unsupported(raw: Mapping[str, Any], faults: list[Fault]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        faults.append(("hidden_act", raw["hidden_act"], "must be silu"))


def _blocks(raw: Mapping[str, Any], faults: list[Fault]) -> dict[str, str]:
    """Return which tensors are kept in which blocks of a GGUF file, as ``gguf_convert`` writes it."""
    found = raw.get("quantization_config")
    if found is None:
        return {}
    method = found.get("quant_method", found) if isinstance(found, dict) else found
    if method != GGUF_BLOCKS:
        rule = f"must be absent, or {GGUF_BLOCKS} as our converter writes it: other quantized checkpoints are not read"
        faults.append(("quantization_config", method, rule))
        return {}
    kinds = found.get("tensors")
    if not isinstance(kinds, dict) or not kinds or any(kind not in BLOCK_KINDS for kind in kinds.values()):
        rule = f"must name {', '.join(BLOCK_KINDS)} for each tensor in blocks"
        faults.append(("quantization_config.tensors", kinds, rule))
        return {}
    return kinds


def _windows(raw: Mapping[str, Any], traits: _Traits, num_layers: int, fields: _Reader) -> tuple[int, ...]:
    full = (0,) * num_layers
    switched_off = traits.window == "switched" and not fields.boolean("use_sliding_window")
    if traits.window == "none" or switched_off or raw.get("sliding_window") is None:
        return full
    window = fields.whole("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is None:
        first = fields.whole("max_window_layers", default=28, least=0) if traits.window == "switched" else 0
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        fields.faults.append(
            ("layer_types", kinds, f"must name one of {', '.join(known)} for each of {num_layers} layers")
        )
        return full
    return tuple(known[kind] for kind in kinds)


class _Reader:
    """Reads typed fields; a wrong one is noted and replaced by a value that lets the reading go on."""

    def __init__(self, raw: Mapping[str, Any], faults: list[Fault]) -> None:
        self._raw = raw
        self.faults = faults
        self._wrong: set[str] = set()

    def are_right(self, *names: str) -> bool:
        return self._wrong.isdisjoint(names)

    def whole(self, field: str, *, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        value = self._raw.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.faults.append((field, value, f"must be a whole number, at least {least}"))
            self._wrong.add(field)
            return max(least, 1)
        if value > most:
            self.faults.append((field, value, f"must be at most {most}"))
            self._wrong.add(field)
            return max(least, 1)
        return value

    def number(self, field: str, *, default: float) -> float:
        value = self._raw.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.faults.append((field, value, "must be a number above 0"))
            return default
        return float(value)

    def boolean(self, field: str) -> bool:
        value = self._raw.get(field)
        if value is not None and not isinstance(value, bool):
            self.faults.append((field, value, "must be true or false"))
        return value is True
