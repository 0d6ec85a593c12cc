"""Read the model string of the scripted model: ``scripted``, ``scripted:{json}`` or ``scripted:/path/of.json``.

The scripted model has no weights: its logits are a hash of the row's own tokens. It serves tests, benchmarks and client
authors. The control plane reads the vocabulary from here, a worker everything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, cast, get_args

from service_chassis.errors import InvalidParameter

FaultKind = Literal["raise", "hang", "exit", "abort", "stop", "wrong_digest"]
SamplerKind = Literal["auto", "numpy", "torch"]

# Without a vocabulary of its own: the 256 bytes and four special tokens.
BYTE_VOCAB_SIZE = 260
BYTE_EOS_ID = 256
_PREFIX = "scripted"


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong on one rank when it executes one step; step 0 is the loading of the model."""

    rank: int
    step: int
    kind: FaultKind
    after_s: float = 0.0  # seconds into the step


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedOptions:
    """What the JSON may say; every key is optional."""

    step_time_s: float = 0.0
    """Seconds a step takes at least."""
    step_time_per_token_s: float = 0.0
    """Seconds each scheduled token adds to that."""
    load_time_s: float = 0.0
    """Seconds that loading takes."""
    vocab: tuple[str, ...] = ()
    """The tokens' texts, the last is end of text. Empty: bytes."""
    forced: tuple[int, ...] = ()
    """What every request gets, by output index, then end of text."""
    forced_by_prompt: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """The same for requests with exactly this prompt. In JSON the prompt is its ids joined by spaces."""
    faults: tuple[Fault, ...] = ()
    """Injected faults."""
    max_position: int = 4096
    """The longest context."""
    sampler: SamplerKind = "auto"
    """numpy serves greedy and seeded rows; auto takes torch, where it is there, for rows that need more."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return len(self.vocab) or BYTE_VOCAB_SIZE

    @property
    def eos_token_id(self) -> int:
        """End of text."""
        return len(self.vocab) - 1 if self.vocab else BYTE_EOS_ID


def fail_at(rank: int, step: int, kind: FaultKind = "raise", *, after_s: float = 0.0) -> Fault:
    """Return a fault for ``scripted_model``."""
    return Fault(rank, step, kind, after_s)


def scripted_model(options: ScriptedOptions) -> str:
    """Return the model string that ``parse_scripted`` reads back as ``options``."""
    plain = ScriptedOptions()
    chosen = {f.name: getattr(options, f.name) for f in fields(options)}
    chosen = {name: value for name, value in chosen.items() if value != getattr(plain, name)}
    if "faults" in chosen:
        chosen["faults"] = [asdict(fault) for fault in options.faults]
    if "forced_by_prompt" in chosen:
        chosen["forced_by_prompt"] = {" ".join(map(str, k)): list(v) for k, v in options.forced_by_prompt.items()}
    return f"{_PREFIX}:{json.dumps(chosen)}" if chosen else _PREFIX


def parse_scripted(model: str) -> ScriptedOptions | None:
    """Return the options of a scripted model, or None where ``model`` names something else.

    Raises:
        InvalidParameter: it means a scripted model, and its JSON is wrong.
    """
    if model == _PREFIX:
        return ScriptedOptions()
    if not model.startswith(f"{_PREFIX}:"):
        return None
    text = model.removeprefix(f"{_PREFIX}:")
    if not text.startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameter("model", model, f"the file cannot be read: {error}") from None
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidParameter("model", model, f"must be JSON after 'scripted:': {error}") from None
    if not isinstance(raw, dict):
        raise InvalidParameter("model", model, "must be a JSON object after 'scripted:'")
    known = {f.name for f in fields(ScriptedOptions)}
    for key in raw:
        if key not in known:
            raise InvalidParameter(f"model.{key}", raw[key], f"unknown; the keys are {', '.join(sorted(known))}")
    return _options(raw)


def _options(raw: Mapping[str, object]) -> ScriptedOptions:
    plain = ScriptedOptions()
    vocab = _vocab(raw.get("vocab", ()))
    vocab_size = len(vocab) or BYTE_VOCAB_SIZE
    forced_by_prompt = raw.get("forced_by_prompt", {})
    if not isinstance(forced_by_prompt, dict):
        raise InvalidParameter("model.forced_by_prompt", forced_by_prompt, "must be an object")
    by_prompt: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, ids in forced_by_prompt.items():
        prompt = [int(word) if word.isdecimal() else -1 for word in key.split()]
        by_prompt[_ids("forced_by_prompt", prompt, vocab_size)] = _ids("forced_by_prompt", ids, vocab_size)
    max_position = raw.get("max_position", plain.max_position)
    if not isinstance(max_position, int) or isinstance(max_position, bool) or max_position < 2:
        raise InvalidParameter("model.max_position", max_position, "must be an integer of at least 2")
    sampler = raw.get("sampler", plain.sampler)
    if sampler not in get_args(SamplerKind):
        raise InvalidParameter("model.sampler", sampler, f"must be one of {', '.join(get_args(SamplerKind))}")
    return ScriptedOptions(
        step_time_s=_seconds("step_time_s", raw.get("step_time_s", 0.0)),
        step_time_per_token_s=_seconds("step_time_per_token_s", raw.get("step_time_per_token_s", 0.0)),
        load_time_s=_seconds("load_time_s", raw.get("load_time_s", 0.0)),
        vocab=vocab,
        forced=_ids("forced", raw.get("forced", ()), vocab_size),
        forced_by_prompt=by_prompt,
        faults=_faults(raw.get("faults", ())),
        max_position=max_position,
        sampler=cast(SamplerKind, sampler),
    )


def _vocab(value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise InvalidParameter("model.vocab", value, "must be a list of strings, the last is end of text")
    if len(value) == 1 or len(set(value)) != len(value):
        raise InvalidParameter("model.vocab", value, "must have at least two tokens, all different")
    return tuple(value)


def _ids(key: str, value: object, vocab_size: int) -> tuple[int, ...]:
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if not good or not all(type(i) is int and 0 <= i < vocab_size for i in cast(Sequence[object], value)):
        raise InvalidParameter(f"model.{key}", value, f"must be token ids in [0, {vocab_size})")
    return tuple(cast(Sequence[int], value))


def _seconds(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise InvalidParameter(f"model.{key}", value, "must be a number of seconds, at least 0")
    return float(value)


def _faults(value: object) -> tuple[Fault, ...]:
    rule = f'must be a list of {{"rank", "step", "kind", "after_s"}}, kind one of {", ".join(get_args(FaultKind))}'
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidParameter("model.faults", value, rule)
    faults = []
    for entry in value:
        required = {"rank", "step", "kind"}
        if not isinstance(entry, dict) or not required <= set(entry) <= required | {"after_s"}:
            raise InvalidParameter("model.faults", entry, rule)
        rank, step, kind = entry["rank"], entry["step"], entry["kind"]
        if type(rank) is not int or type(step) is not int or min(rank, step) < 0 or kind not in get_args(FaultKind):
            raise InvalidParameter("model.faults", entry, rule)
        faults.append(Fault(rank, step, kind, _seconds("faults.after_s", entry.get("after_s", 0.0))))
    return tuple(faults)
