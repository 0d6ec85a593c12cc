"""Compute the cosines and sines of rotary embedding, with the ways to scale them for longer contexts.

Reads both spellings: ``rope_theta`` + ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).
Sources: Su et al. 2021; Chen et al. 2023 (linear); Peng et al. 2023 (yarn); the Llama 3.1 release (llama3). Everything
is computed in float32, in transformers' order of operations, so that long positions round alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

Fault = tuple[str, object, str]

# Parameters of each kind: required, then optional with defaults. `factor` stretches the context.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles."""

    kind: str
    theta: float
    head_dim: int
    original_max_position: int
    parameters: Mapping[str, float]  # those of `_REQUIRED` and, for yarn, the optional ones that were given
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions


def read_rope(raw: Mapping[str, Any], head_dim: int, max_position: int, faults: list[Fault]) -> RopeConfig:
    """Read the rotary parameters of a configuration; add whatever is wrong to ``faults``."""
    field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    given = raw.get(field) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        faults.append((field, given, "must be one flat set of parameters for all layers"))
        given = {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _REQUIRED:
        faults.append((f"{field}.rope_type", kind, f"must be one of {', '.join(_REQUIRED)}"))
        kind = "default"
    theta = given.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        theta = 10000.0
    elif not _is_positive(theta):
        faults.append(("rope_theta", theta, "must be a number above 0"))
        theta = 10000.0
    share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        faults.append(("partial_rotary_factor", share, "must be 1: rotating a part of the head is not supported"))
    parameters = {}
    for name in (*_REQUIRED[kind], *(_YARN_OPTIONAL if kind == "yarn" else ())):
        value = given.get(name)
        if value is None and name not in _REQUIRED[kind]:
            continue
        if not _is_positive(value):
            faults.append((f"{field}.{name}", value, f"must be a number above 0 for rope type {kind}"))
            value = 1.0
        parameters[name] = float(value)
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        faults.append((f"{field}.high_freq_factor", parameters["high_freq_factor"], "must be above low_freq_factor"))
        kind = "default"
    original = given.get("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        head_dim=head_dim,
        original_max_position=int(original) if _is_positive(original) else max_position,
        parameters=parameters,
        truncate=bool(given.get("truncate", True)),
    )


def _is_positive(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and value > 0


def cosines_and_sines(config: RopeConfig, max_model_len: int) -> Tensor:
    """Return [max_model_len, head_dim] float32: cosines of all pairs, then sines."""
    frequencies, magnitude = _frequencies(config)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies[None]
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1)


def _frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Return the angle per position of each pair [head_dim / 2], and a factor of cosines and sines."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    base = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return base / config.parameters["factor"], 1.0
    if config.kind == "llama3":
        return _llama3(base, config), 1.0
    if config.kind == "yarn":
        return _yarn(config)
    # "dynamic" changes the base only beyond max_position_embeddings, where contexts end here.
    return base, 1.0


def _llama3(base: Tensor, config: RopeConfig) -> Tensor:
    """Stretch long waves, leave short ones, and blend between."""
    factor, low, high = (config.parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = config.parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / base
    stretched = torch.where(wavelength > original / low, base / factor, base)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    is_medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(is_medium, blended, stretched)


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    """Interpolate pairs that turn rarely within the original context, keep those that turn often."""
    parameters, dim = config.parameters, config.head_dim
    factor = parameters["factor"]

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        if "mscale" in parameters and "mscale_all_dim" in parameters:
            attention_factor = magnitude(factor, parameters["mscale"]) / magnitude(factor, parameters["mscale_all_dim"])
        else:
            attention_factor = magnitude(factor)

    def dimension(rotations: float) -> float:
        """Return the pair that makes so many turns within the original context."""
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(parameters.get("beta_fast", 32.0)), dimension(parameters.get("beta_slow", 1.0))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp divides by the difference
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    keep = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep, attention_factor
