"""Read a checkpoint into the modules of transformers: straight into their tensors, a rank's part alone.

Names are turned into those of the modules by transformers' own rules. Of its conversions the one is known that puts the
experts of a layer into one tensor; their parts are read to where they stay.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from worker_service.models.checkpoint import Slot
from worker_service.models.transformers_split import SplitPlan

_building = threading.Lock()  # types by default, and how parameters come to be, are the process's


@contextmanager
def without_contents(dtype: torch.dtype) -> Iterator[None]:
    """Have modules that are made meanwhile keep the shapes of their parameters alone; buffers are computed."""
    with _building:
        register, usual = Module.register_parameter, torch.get_default_dtype()

        def register_shape(self: Module, name: str, param: Parameter | None) -> None:
            if param is not None and not param.is_meta:
                param = Parameter(param.to("meta"), requires_grad=False)
            register(self, name, param)

        torch.set_default_dtype(dtype)
        Module.register_parameter = register_shape  # type: ignore[method-assign]
        try:
            yield
        finally:
            Module.register_parameter = register  # type: ignore[method-assign]
            torch.set_default_dtype(usual)


def kept_type(causal: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a parameter: some stay float32 where transformers says so."""
    wide = set(causal._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        wide |= set(causal._keep_in_fp32_modules or ())
    if dtype is torch.float32 or not any(re.search(rf"(?:^|\.){re.escape(one)}(?:\.|$)", name) for one in wide):
        return dtype
    return torch.float32


class Tensors:
    """The tensors of a model, by name: parameters, each once under whatever names it has, and stored buffers."""

    def __init__(self, causal: Any, plan: SplitPlan, dtype: torch.dtype) -> None:
        self._causal = causal
        self._plan = plan
        self._buffers = {name for name, _ in causal.named_buffers()}
        stored = causal.state_dict(keep_vars=True)
        self._first: dict[str, str] = {}  # name -> the name that its tensor goes by
        seen: dict[int, str] = {}
        self.shapes: dict[str, Tensor] = {}  # by that name, without contents
        for name, tensor in stored.items():
            first = self._first[name] = seen.setdefault(id(tensor), name)
            if first == name:
                kind = tensor.dtype if name in self._buffers else kept_type(causal, name, dtype)
                shape = plan.local_shape(name, tensor.shape)
                self.shapes[name] = torch.empty(shape, dtype=kind, device="meta")
        self._rules = _Rules(causal, stored)

    def allocate(self, device: torch.device, *, make: Callable[..., Tensor] = torch.empty_like) -> dict[str, Tensor]:
        """Put tensors with room for contents in the place of all shapes, and return them by name."""
        made = {name: make(shape, device=device) for name, shape in self.shapes.items()}
        parameters = {
            name: Parameter(tensor, requires_grad=False) for name, tensor in made.items() if name not in self._buffers
        }
        for path, module in self._causal.named_modules():
            prefix = f"{path}." if path else ""
            for name in list(module._parameters):
                if (first := self._first.get(prefix + name)) is not None:
                    module._parameters[name] = parameters[first]
            for name, buffer in list(module._buffers.items()):
                if (first := self._first.get(prefix + name)) is not None:
                    module._buffers[name] = made[first]
                elif buffer is not None:
                    module._buffers[name] = buffer.to(device)
        return made

    def slots(self, names: Mapping[str, str], targets: Mapping[str, Tensor]) -> dict[str, Slot]:
        """Return where each tensor of a checkpoint goes; what no tensor goes to is asked for by its own name.

        Args:
            names: of the checkpoint's tensors -> their types.
            targets: what ``allocate`` returned, or ``shapes``.
        """
        result: dict[str, Slot] = {}
        filled = dict.fromkeys(self.shapes, 0)
        tied = []
        for stored in names:
            found = self._rules.place_of(stored)
            if found is None:
                continue
            name, place = found
            if self._first[name] != name:
                tied.append((stored, self._first[name], place))
                continue
            self._add(result, filled, stored, name, place, targets)
        for stored, name, place in tied:  # only where a tied weight is stored under its second name
            if not filled[name]:
                self._add(result, filled, stored, name, place, targets)
        for name, target in targets.items():
            if filled[name] < target.numel():
                result[name] = Slot(target)
        return result

    def _add(
        self,
        result: dict[str, Slot],
        filled: dict[str, int],
        stored: str,
        name: str,
        place: tuple[int, int, int] | None,
        targets: Mapping[str, Tensor],
    ) -> None:
        cut = self._plan.cuts.get(name)
        target = targets[name]
        if place is not None:
            expert, part, num_parts = place
            if expert >= len(target):
                return
            target = target[expert].chunk(num_parts, dim=0)[part] if num_parts > 1 else target[expert]
        elif cut is not None and cut.packed:
            return  # two halves in one tensor: no part of a file
        filled[name] += target.numel()
        if cut is None:
            result[stored] = Slot(target)
        else:
            result[stored] = Slot(target, target.dim() + cut.dim, self._plan.rank, self._plan.world_size)

    def ignores(self, stored: str) -> bool:
        """Say whether a tensor of a checkpoint has no meaning here: buffers that are computed, and copies."""
        found = self._rules.place_of(stored)
        if found is not None:
            return self._first[found[0]] != found[0]
        renamed = self._rules.renamed(stored)
        unexpected = self._causal._keys_to_ignore_on_load_unexpected or ()
        return renamed in self._buffers or any(re.search(one, renamed) for one in (*unexpected, *_OLD_BUFFERS))


# Of older releases of transformers, which stored what can be computed.
_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"attn\.(masked_)?bias$", r"attention\.(masked_)?bias$")


class _Rules:
    """How transformers turns the names of a checkpoint into those of a model."""

    def __init__(self, causal: Any, stored: Mapping[str, Tensor]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        found = get_model_conversion_mapping(causal)
        self._renamings: list[Any] = [one for one in found if not isinstance(one, WeightConverter)]
        self._converters = [one for one in found if isinstance(one, WeightConverter)]
        self._prefix = causal.base_model_prefix
        self._stored = stored

    def renamed(self, name: str) -> str:
        return self._rename(name)[0]

    def _rename(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(
            name,
            self._renamings,
            self._converters,
            self._prefix,
            self._stored,  # type: ignore[arg-type]
        )
        if renamed not in self._stored and name in self._stored:
            return name, None
        return renamed, pattern

    def place_of(self, name: str) -> tuple[str, tuple[int, int, int] | None] | None:
        """Return the model's tensor that one of a checkpoint belongs to, and the place: (expert, part, parts).

        None: there is no such tensor, or it is made in a way that is not known.
        """
        renamed, pattern = self._rename(name)
        if renamed not in self._stored:
            return None
        if pattern is None:
            return renamed, None
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        sources = list(converter.source_patterns)
        kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
        known = [("MergeModulelist", 0)] if len(sources) == 1 else [("MergeModulelist", 0), ("Concatenate", 1)]
        number = re.search(pattern.lstrip("^").rstrip("$").replace(".", r"\.").replace("*", r"(\d+)"), name)
        if kinds != known or len(converter.target_patterns) != 1 or number is None:
            return None
        return renamed, (int(number[1]), sources.index(pattern), len(sources))
