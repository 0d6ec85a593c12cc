"""Read the configuration of a model that transformers computes: what cannot be served is refused by name.

Whatever code a directory brings is never run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service_chassis.errors import InvalidParameter

# The part that transformers writes for itself; two checkpoints that differ in it are of one model.
_OF_THE_WRITER = ("transformers_version", "_name_or_path", "architectures", "dtype")
_INPUTS_BESIDE_TEXT = ("vision_config", "audio_config", "text_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """What is known of a model before it is built. Names as in ``LlamaConfig``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    dtype: str
    fields: dict[str, Any] = field(repr=False)  # of the configuration, but for those of the writer


def read_raw(directory: Path) -> dict[str, Any]:
    """Return what ``config.json`` says. Raises ``InvalidParameter``."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameter("model", str(directory), f"must hold config.json ({error.strerror})") from None
    except ValueError as error:
        raise InvalidParameter("model", str(path), f"config.json must be JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidParameter("model", str(path), "config.json must be a JSON object")
    return raw


def load_transformers_config(directory: Path) -> tuple[TransformersConfig, Any]:
    """Read the configuration of a model directory: our view of it, and transformers'.

    Raises:
        InvalidParameter: it is no causal language model that transformers has code for, or one that keeps more from
            token to token than keys and values.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    raw = read_raw(directory)
    names = raw.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own = "; its own code in auto_map is never run" if raw.get("auto_map") else ""
        rule = f"must be a kind of model that transformers has code for, and model_type is {model_type!r}{own}"
        raise _refused(directory, architecture, rule)
    if architecture != CLASSES.get(model_type):
        rule = f"must be the causal language model of its kind: {model_type} has {CLASSES.get(model_type, 'none')}"
        raise _refused(directory, architecture, rule)
    if "quantization_config" in raw:
        raise _refused(directory, architecture, "must not be quantized: such checkpoints are not read")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a configuration's checks raise
        raise _refused(directory, architecture, f"config.json: {type(error).__name__}: {error}") from None
    if config.is_encoder_decoder:
        raise _refused(directory, architecture, "must be a decoder alone: it has an encoder, too")
    if inputs := [name for name in _INPUTS_BESIDE_TEXT if getattr(config, name, None) is not None]:
        raise _refused(directory, architecture, f"must take nothing but text: config.json has {', '.join(inputs)}")
    fields = {name: value for name, value in config.to_dict().items() if name not in _OF_THE_WRITER}
    sizes = {
        name: _size(config, directory, architecture, name)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    return TransformersConfig(
        architecture=architecture,
        vocab_size=sizes["vocab_size"],
        # Small OPTs project what they compute down before it is scored.
        hidden_size=getattr(config, "word_embed_proj_dim", None) or sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        max_position=_max_position(config, directory, architecture),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        fields=json.loads(json.dumps(fields, default=str)),
    ), config


def _size(config: Any, directory: Path, architecture: str, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(directory, architecture, f"config.json must have a whole number as {name}, not {value!r}")
    return value


def _max_position(config: Any, directory: Path, architecture: str) -> int:
    """Return up to where a token's rotation depends on its own position alone.

    Of longrope the frequencies change for the whole context once it grows beyond what the model was first trained
    for: keys that are in the cache would be of the wrong ones.
    """
    longest = _size(config, directory, architecture, "max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if one.get("rope_type") == "longrope":
            inner, outer = one.get("original_max_position_embeddings"), "original_max_position_embeddings"
            original = inner or getattr(config, outer, None) or longest
            longest = min(longest, int(original))
    return longest


def _refused(directory: Path, architecture: str, rule: str) -> InvalidParameter:
    return InvalidParameter("model", str(directory), f"{architecture or 'a model without architectures'}: {rule}")
