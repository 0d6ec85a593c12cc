"""What transformers' modules call as their attention: the paged cache of the step that this thread computes.

Registered twice. Under ``OBSERVED`` a forward computes nothing and notes what each layer asks for, with the mask that
transformers would have made for it; under ``PAGED`` layers are served as they were observed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional

from worker_service.attention.base import KvLayer, StepAttention

PAGED = "maniple"
OBSERVED = "maniple-observed"

# Arguments that change nothing, or that are known without them. Others must be None.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",  # the module's own is looked at
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # keys and queries come rotated
        "return_dict",
        "sliding_window",  # the mask says it, and holds where the two differ
        "use_cache",
    }
)
_LAYER = "_maniple_layer"  # attribute of an attention module: which cache is its own


class Unservable(Exception):
    """A layer asks for what the paged cache does not do; the message says what."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer asks for."""

    num_heads: int  # on this rank
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    window: int  # 0: all keys


@dataclass(slots=True)
class Observation:
    """What one forward asked for, call by call."""

    max_position: int
    modules: list[Module] = field(default_factory=list)
    layers: list[LayerFacts] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SeenKeys:
    """Stands in the place of a mask while a forward is observed."""

    window: int
    fault: str = ""  # why no layer can be served with this mask; some are made and never used


@dataclass(frozen=True, slots=True)
class _Step:
    slots: Tensor
    kv: Sequence[KvLayer]
    attention: StepAttention


class _Running(threading.local):
    step: _Step | None = None
    observation: Observation | None = None


_running = _Running()


def register() -> None:
    """Tell transformers of our attention. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _paged)
    AttentionInterface.register(OBSERVED, _observe)
    AttentionMaskInterface.register(OBSERVED, _observe_mask)


@contextmanager
def serving(slots: Tensor, kv: Sequence[KvLayer], attention: StepAttention) -> Iterator[None]:
    """Let layers attend to this cache, as far as this thread goes."""
    _running.step = _Step(slots, kv, attention)
    try:
        yield
    finally:
        _running.step = None


@contextmanager
def observing(max_position: int) -> Iterator[Observation]:
    """Note what the layers of a forward of this thread ask for."""
    observation = _running.observation = Observation(max_position)
    try:
        yield observation
    finally:
        _running.observation = None


def number_layers(modules: Sequence[Module], windows: Sequence[int]) -> None:
    """Give each attention module its cache, by their order, and its window."""
    for layer, (module, window) in enumerate(zip(modules, windows, strict=True)):
        setattr(module, _LAYER, (layer, window))


def _paged(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Store and attend for [1, heads, tokens, head_dim]; return [1, tokens, heads, value_dim]."""
    step = _running.step
    assert step is not None, "no step is computed"
    _check(module, others)
    layer, window = getattr(module, _LAYER)
    kv = step.kv[layer]
    dtype, head_dim, value_dim = kv[0].dtype, query.shape[-1], value.shape[-1]
    if value_dim < head_dim:
        value = functional.pad(value, (0, head_dim - value_dim))
    queries, keys, values = (one[0].transpose(0, 1).to(dtype).contiguous() for one in (query, key, value))
    step.attention.store(keys, values, step.slots, kv)
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    attended = step.attention.attend(queries, kv, scale, window, softcap or 0.0)
    return attended[None, ..., :value_dim].to(query.dtype), None


def _observe(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    observation = _running.observation
    assert observation is not None, "nothing is observed"
    _check(module, others)
    if not isinstance(attention_mask, _SeenKeys):
        raise Unservable("a layer attends by a mask of its own making, and not by transformers' interface")
    if attention_mask.fault:
        raise Unservable(attention_mask.fault)
    if query.shape[2] != key.shape[2]:
        raise Unservable(f"a layer attends with {query.shape[2]} queries to {key.shape[2]} keys of its own")
    if value.shape[3] > key.shape[3]:
        raise Unservable(f"a layer has values of {value.shape[3]} numbers and keys of {key.shape[3]}")
    observation.modules.append(module)
    observation.layers.append(
        LayerFacts(query.shape[1], key.shape[1], key.shape[3], value.shape[3], attention_mask.window)
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _check(module: Module, others: dict[str, Any]) -> None:
    if not getattr(module, "is_causal", True):
        raise Unservable("a layer looks at later tokens")
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise Unservable(f"a layer asks of attention what is not honoured: {', '.join(sorted(unknown))}")


def _observe_mask(*, mask_function: Callable[..., Any], **others: Any) -> _SeenKeys:
    observation = _running.observation
    assert observation is not None, "nothing is observed"
    try:
        return _SeenKeys(_window_of(mask_function, observation.max_position))
    except Unservable as fault:
        return _SeenKeys(0, str(fault))


def _window_of(mask_function: Callable[..., Any], max_position: int) -> int:
    """Return how many keys a token sees by a mask, itself included; 0: all before it.

    Raises:
        Unservable: it sees others, or the number depends on where it stands.
    """
    keys = torch.arange(max_position)
    zero = torch.zeros((), dtype=torch.long)

    def visible(position: int) -> int:
        try:
            seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(position), keys)).expand(len(keys))
        except (IndexError, RuntimeError, TypeError):
            raise Unservable("a layer's mask depends on more than how far apart tokens are") from None
        count = int(seen.sum())
        if not seen[position + 1 - count : position + 1].all() or count < 1:
            raise Unservable("a layer attends to other tokens than those before, all or the nearest")
        return count

    last = max_position - 1
    longest = visible(last)
    for position in {0, min(1, last), last // 3, last // 2, max(0, last - 1)}:
        if visible(position) != min(position + 1, longest):
            raise Unservable("a layer sees more or fewer tokens depending on where it stands: chunked attention")
    return 0 if longest == max_position else longest
