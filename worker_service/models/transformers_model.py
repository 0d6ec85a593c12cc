"""Causal language models by transformers' own modules, with our paged attention in the place of theirs.

What is served is tried first: a forward without contents says how each layer calls attention, before weights are read;
with the weights, some tokens in two pieces through the cache must score as transformers computes them whole.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Conv1d, Linear

from service_chassis.errors import InvalidParameter
from service_chassis.telemetry import get_logger
from worker_service.attention.base import KvLayer, StepAttention
from worker_service.attention.reference import ReferenceAttention
from worker_service.input_batch import StepInput
from worker_service.kv_cache import KvCache, KvCacheSpec
from worker_service.models.checkpoint import Slot, check_checkpoint, read_tensors, stored_types
from worker_service.models.layers import Placement
from worker_service.models.transformers_attention import (
    OBSERVED,
    PAGED,
    LayerFacts,
    Unservable,
    number_layers,
    observing,
    register,
    serving,
)
from worker_service.models.transformers_config import TransformersConfig, load_transformers_config
from worker_service.models.transformers_head import SplitHead, SplitModel
from worker_service.models.transformers_split import SplitPlan, exchange, plan_split
from worker_service.models.transformers_weights import Tensors, without_contents
from worker_service.tensor_group import TensorGroup

_TRIED_TOKENS = 6
# Relative norm of the difference of scores that rounding alone makes. Half types: two orders of summation may choose
# other experts for a token.
_ROUNDING = {torch.float32: 1e-2}
_ROUNDING_OF_HALVES = 0.25


class TransformersModel:
    """See ``worker_service.models.registry.Model``."""

    records = False  # modules may wait for the device, which no graph can hold

    def __init__(
        self,
        config: TransformersConfig,
        split: SplitModel,
        layers: LayerFacts,
        slots: dict[str, Slot],
        tensors: Tensors,
    ) -> None:
        self.config = config
        self.num_heads = layers.num_heads
        self.num_kv_heads = layers.num_kv_heads
        self.head_dim = layers.head_dim
        self._split = split
        self._slots = slots
        self._tensors = tensors

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and buffers on this rank, each once."""
        causal = self._split.causal
        found = {one.data_ptr(): one.nbytes for one in (*causal.parameters(), *causal.buffers()) if one.numel()}
        return sum(found.values())

    def forward(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attention: StepAttention
    ) -> Tensor:
        """Return [num_tokens, hidden_size] as it comes to the projection to scores."""
        with serving(slots, kv, attention):
            return self._split.hidden(input_ids, positions)

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``: it is behind the final norm already."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return [num_rows, vocab_size] float32 on rank 0; None on the others."""
        return self._split.scores(hidden)

    def slots(self) -> dict[str, Slot]:
        """Return where each tensor of a checkpoint goes."""
        return self._slots

    def ignores(self, name: str) -> bool:
        """Say whether a tensor of a checkpoint has no meaning here."""
        return self._tensors.ignores(name)

    @staticmethod
    def read_config(directory: Path) -> TransformersConfig:
        """Read the configuration of another checkpoint."""
        return load_transformers_config(directory)[0]


def load_transformers_model(
    directory: Path,
    config: TransformersConfig,
    own: Any,
    placement: Placement,
    progress: Callable[[float, str], None],
) -> TransformersModel:
    """Build a model and read its weights: this rank's part.

    Args:
        directory: of the model.
        config: as read from it.
        own: transformers' configuration.
        placement: where it goes.
        progress: is told how far it is.

    Raises:
        InvalidParameter: it cannot be served; says why.
    """
    register()
    try:
        shapes = _build(own, placement.dtype, on_meta=True)
    except Exception as error:  # of sizes that do not fit each other
        raise _refused(config, f"cannot be built: {type(error).__name__}: {error}") from error
    _check_state(shapes, config)
    projection = _projection_of(shapes, config)
    plan = plan_split(shapes, own, placement.rank, placement.world_size, projection=projection)
    tensors = Tensors(shapes, plan, placement.dtype)
    stored = stored_types(directory)
    entries = check_checkpoint(directory, tensors.slots(stored, tensors.shapes), ignored=tensors.ignores)
    tensors.allocate(torch.device("meta"))
    found = _observe(shapes, own, config, plan, placement.dtype)

    causal = _build(own, placement.dtype)
    tensors = Tensors(causal, plan, placement.dtype)
    slots = tensors.slots(stored, tensors.allocate(placement.device))
    read_tensors(entries, slots, progress=progress)
    exchange(causal, plan, placement.group, projection=projection)
    is_alone = placement.world_size == 1
    expected = _whole_scores(causal, config, placement.device) if is_alone else None
    head = SplitHead(
        causal.get_submodule(projection),
        rank=placement.rank,
        world_size=placement.world_size,
        group=placement.group,
        is_split=projection in plan.styles,
    )
    causal.set_submodule(projection, head)
    causal.set_attn_implementation(PAGED)
    number_layers([causal.get_submodule(path) for path in found.attention], found.windows)
    split = SplitModel(causal, causal.get_submodule(found.body), head)
    model = TransformersModel(config, split, found.layer, slots, tensors)
    if expected is not None:
        _check_scores(model, expected, placement)
    get_logger().info("model.by_transformers", architecture=config.architecture, windows=sorted(set(found.windows)))
    return model


def _build(own: Any, dtype: torch.dtype, *, on_meta: bool = False) -> Any:
    """Return the model, its parameters without contents; buffers have theirs unless it is all ``on_meta``."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config  # has no types
    with without_contents(dtype), torch.device("meta") if on_meta else contextlib.nullcontext():
        return make(own, attn_implementation="eager", dtype=dtype).eval()


def _check_state(causal: Any, config: TransformersConfig) -> None:
    """Refuse what keeps more from token to token than keys and values, or knows no positions."""
    if causal._is_stateful:
        raise _refused(config, "keeps a state from token to token besides keys and values")
    if found := next((path for path, module in causal.named_modules() if isinstance(module, Conv1d)), None):
        raise _refused(config, f"keeps a state besides keys and values, for the convolution {found}")
    if "position_ids" not in inspect.signature(causal.forward).parameters:
        raise _refused(config, "takes no positions of tokens, so that requests cannot lie side by side")


def _projection_of(causal: Any, config: TransformersConfig) -> str:
    """Return the name of the module that makes scores."""
    wanted = causal.get_output_embeddings()
    path: str | None = next((path for path, module in causal.named_modules() if module is wanted), None)
    if path is None or type(wanted) is not Linear or wanted.out_features != config.vocab_size:
        raise _refused(config, f"does not score {config.vocab_size} ids by one linear layer")
    return path


@dataclass(frozen=True, slots=True)
class _Found:
    """What a forward without contents told."""

    body: str  # name of the module whose outcome is projected to scores
    attention: list[str]  # names of the modules that attend, in order
    windows: list[int]
    layer: LayerFacts  # of each layer, but for windows


def _observe(shapes: Any, own: Any, config: TransformersConfig, plan: SplitPlan, dtype: torch.dtype) -> _Found:
    """Run a forward without contents. Raises ``InvalidParameter`` for what the cache does not do."""
    try:
        return _observed(shapes, config, plan, torch.device("meta"))
    except InvalidParameter:
        raise
    except Exception:  # modules of others, which may look at values on their way
        # Zeros take no memory, and a while to be computed with.
        blank = _build(own, dtype)
        Tensors(blank, plan, dtype).allocate(torch.device("cpu"), make=torch.zeros_like)
    try:
        return _observed(blank, config, plan, torch.device("cpu"))
    except InvalidParameter:
        raise
    except Exception as error:
        raise _refused(config, f"fails to compute: {type(error).__name__}: {error}") from error


def _observed(causal: Any, config: TransformersConfig, plan: SplitPlan, device: torch.device) -> _Found:
    exchange(causal, plan, TensorGroup(torch.device("cpu")), projection="")
    called: list[str] = []
    for path, module in causal.named_modules():
        if path:
            module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
        if path.endswith(".experts"):  # choose tokens by their values, and attend to nothing
            module.forward = lambda x, *_, **__: torch.zeros_like(x)
    causal.set_attn_implementation(OBSERVED)
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
    with torch.inference_mode(), observing(config.max_position) as observation:
        try:
            causal(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        except Unservable as error:
            raise _refused(config, str(error)) from None
    names = {id(module): path for path, module in causal.named_modules()}
    attention = [names[id(module)] for module in observation.modules]
    if len(attention) != config.num_layers or len(set(attention)) != len(attention):
        times = f"{len(attention)} times in {config.num_layers} layers"
        raise _refused(config, f"must call attention through transformers' interface once in each layer: {times}")
    layers = observation.layers
    if len({replace(layer, window=0) for layer in layers}) > 1:
        raise _refused(config, "has layers that differ in the number of heads, or in their size")
    return _Found(called[0], attention, [layer.window for layer in layers], layers[0])


def _tried_tokens(config: TransformersConfig, device: torch.device) -> Tensor:
    return (torch.arange(_TRIED_TOKENS, device=device) * 37 + 11) % config.vocab_size


def _whole_scores(causal: Any, config: TransformersConfig, device: torch.device) -> Tensor:
    """Return transformers' own scores of some tokens, [tokens, vocab_size]."""
    with torch.inference_mode():
        scores: Tensor = causal(input_ids=_tried_tokens(config, device)[None], use_cache=False).logits[0].float()
    return scores


def _check_scores(model: TransformersModel, expected: Tensor, placement: Placement) -> None:
    """Compare with the same tokens in two pieces through the cache.

    Raises:
        InvalidParameter: it remembers more than keys and values, or something of the model goes past us.
    """
    block_size = 16
    spec = KvCacheSpec(
        num_layers=model.config.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=placement.dtype,
        layout=ReferenceAttention.layout,
    )
    cache = KvCache(spec, 2, placement.device)
    reference = ReferenceAttention()
    tokens = _tried_tokens(model.config, placement.device)
    scores = []
    for start, end in ((0, 4), (4, _TRIED_TOKENS)):
        positions = np.arange(start, end)
        step = StepInput(
            input_ids=tokens[start:end].cpu().numpy().astype(np.int32),
            positions=positions,
            slot_mapping=positions + block_size,
            query_start_loc=np.array([0, end - start], np.int32),
            seq_lens=np.array([end], np.int32),
            block_tables=np.array([[1]], np.int32),
        )
        attention = reference.begin(step, None)
        with torch.inference_mode():
            places = torch.from_numpy(positions).to(placement.device)
            hidden = model.forward(tokens[start:end], places, places + block_size, cache.layers, attention)
            scored = model.logits(hidden)
        assert scored is not None
        scores.append(scored)
    difference = float((torch.cat(scores) - expected).norm() / expected.norm())
    if difference > _ROUNDING.get(placement.dtype, _ROUNDING_OF_HALVES):
        rule = f"its scores through the paged cache differ from transformers' own by {difference:.2g} of their norm"
        raise _refused(model.config, rule)


def _refused(config: TransformersConfig, rule: str) -> InvalidParameter:
    return InvalidParameter("model", config.architecture, rule)
