"""Split a model of transformers over ranks, as its own plan says, with our collectives.

``model.tp_plan`` names for each module or weight how it is cut. A pair of linears costs one exchange: the first is cut
by outputs, the second by inputs, and partial results are added up. What a model computes with all outputs of is
gathered, by adding up parts beside zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from service_chassis.errors import InvalidParameter
from worker_service.tensor_group import TensorGroup

# Of a plan; the others' names would have to be learnt first.
_WHOLE = frozenset({"embedding_rowwise", "replicate", "replicated_with_grad_allreduce"})  # every rank keeps all
_LINEAR = frozenset({"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"})
_EXPERTS = "moe_tp_experts"
_PACKED = "packed_colwise"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight is cut: along its outputs (-2) or inputs (-1); ``packed``: each of two halves by itself."""

    dim: int
    packed: bool = False


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How one model is split."""

    rank: int = 0
    world_size: int = 1
    cuts: dict[str, Cut] = field(default_factory=dict)  # name of a parameter -> its cut
    styles: dict[str, str] = field(default_factory=dict)  # name of a module -> how it is computed

    def local_shape(self, name: str, shape: torch.Size) -> list[int]:
        """Return what this rank keeps of a parameter."""
        local = list(shape)
        if name in self.cuts:
            local[self.cuts[name].dim] //= self.world_size
        return local


def plan_split(causal: Any, config: Any, rank: int, world_size: int, *, projection: str) -> SplitPlan:
    """Return how a model is split over so many ranks.

    Args:
        causal: the model, its weights without contents.
        config: transformers' configuration.
        rank: of this process.
        world_size: how many ranks.
        projection: name of the module that makes scores.

    Raises:
        InvalidParameter: it has no plan, one that we do not know, or sizes that do not come out even.
    """
    if world_size == 1:
        return SplitPlan()
    name = type(causal).__name__
    plan = causal.tp_plan
    if not plan:
        raise _refused(world_size, f"must be 1: transformers has no plan to split {name}")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for what, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % world_size:
            raise _refused(world_size, f"must divide the model's {what} ({count}), to split {name}")
    parameters = dict(causal.named_parameters())
    cuts: dict[str, Cut] = {}
    styles: dict[str, str] = {}
    for path, module in causal.named_modules():
        style = plan.get(_pattern(path))
        if path == projection:
            if _fits_projection(causal, module, style, world_size):
                cuts[f"{path}.weight"] = Cut(-2)
                styles[path] = "colwise_gather_output"
        elif style in _LINEAR:
            if type(module) is not Linear:
                raise _refused(world_size, f"must be 1: {path} of {name} is a {type(module).__name__}, to be {style}")
            styles[path] = style
            by_outputs = style.startswith("colwise")
            cuts[f"{path}.weight"] = Cut(-2 if by_outputs else -1)
            if module.bias is not None and by_outputs:
                cuts[f"{path}.bias"] = Cut(-1)
        elif style == _EXPERTS:
            styles[path] = style
        elif style is not None and style not in _WHOLE:
            raise _refused(world_size, f"must be 1: the plan to split {name} has {path} as {style}, which is not known")
    for path in parameters:
        style = plan.get(_pattern(path))
        if style in (_PACKED, "colwise", "rowwise"):
            cuts[path] = Cut(-1 if style == "rowwise" else -2, packed=style == _PACKED)
        elif style is not None and style not in _WHOLE:
            raise _refused(world_size, f"must be 1: the plan to split {name} has {path} as {style}, which is not known")
    for path, cut in cuts.items():
        size = parameters[path].shape[cut.dim] // (2 if cut.packed else 1)
        if size % world_size:
            raise _refused(world_size, f"must divide the {size} of {path}")
    return SplitPlan(rank, world_size, cuts, styles)


def _fits_projection(causal: Any, module: Module, style: str | None, world_size: int) -> bool:
    """Say whether scores are split: not where the weight is the embedding's, or does not come out even."""
    if style != "colwise_gather_output" or type(module) is not Linear or module.bias is not None:
        return False
    return module.weight is not causal.get_input_embeddings().weight and module.out_features % world_size == 0


def _pattern(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _refused(world_size: int, rule: str) -> InvalidParameter:
    return InvalidParameter("tensor_parallel_size", world_size, rule)


def exchange(causal: Any, plan: SplitPlan, group: TensorGroup, *, projection: str) -> None:
    """Have the modules of a split model exchange what they must. Once its weights are there."""
    for path, style in plan.styles.items():
        module = causal.get_submodule(path)
        if path == projection or style == "colwise":
            continue
        if style == "colwise_gather_output":
            module.register_forward_hook(_gathering(plan, group))
        elif style == _EXPERTS:
            module.register_forward_hook(lambda _, __, output: group.all_reduce(output.contiguous()))
        else:
            module.forward = _adding_up(module, plan, group, is_whole=style == "rowwise_split_input")


def _gathering(plan: SplitPlan, group: TensorGroup) -> Callable[[Module, Any, Tensor], Tensor]:
    def gather(_: Module, __: Any, output: Tensor) -> Tensor:
        size = output.shape[-1]
        whole = output.new_zeros(*output.shape[:-1], size * plan.world_size)
        whole[..., plan.rank * size : (plan.rank + 1) * size] = output
        return group.all_reduce(whole)  # exact: all but one are zeros

    return gather


def _adding_up(module: Linear, plan: SplitPlan, group: TensorGroup, *, is_whole: bool) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if is_whole:
            x = x.chunk(plan.world_size, dim=-1)[plan.rank]
        y = group.all_reduce(functional.linear(x, module.weight).contiguous())
        return y if module.bias is None else y.add_(module.bias)  # once in the sum

    return forward
