"""Load a runner with random weights, up to ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_checks.random_model import SHAPE_TINY, SHAPE_WIDE, random_weights, write_config
from support.stepper import Stepper
from worker_service.model_runner import TorchModelRunner
from worker_service.runner import LoadOptions, MemoryFacts


def quietly(share: float, detail: str) -> None:
    """Take progress."""


def shape_for(device: str) -> dict[str, Any]:
    """Return the shape of a check that is not about speed."""
    return SHAPE_TINY if device == "cpu" else SHAPE_WIDE


class Loaded:
    """A runner, profiled, with its cache, and warmed up."""

    def __init__(
        self,
        device: str,
        directory: Path,
        shape: dict[str, Any],
        *,
        num_blocks: int = 0,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 256,
        max_model_len: int = 256,
        capture_sizes: tuple[int, ...] = (),
        enforce_eager: bool = False,
        utilization: float = 0.5,
        **options: Any,
    ) -> None:
        """Load; ``num_blocks`` 0 takes what the profile allows, ``options`` are the runner's."""
        self.runner = TorchModelRunner(device=device, num_threads=1, **options)
        load = LoadOptions(
            model=str(write_config(directory, shape)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        with random_weights():
            self.facts = self.runner.load_model(load, quietly)
        self.memory: MemoryFacts = self.runner.profile_memory(utilization)
        self.block_size = load.block_size
        self.num_blocks = num_blocks or int(self.memory.kv_bytes // self.facts.block_bytes)
        self.kv_bytes = self.runner.allocate_kv_cache(self.num_blocks)
        self.graph_bytes = self.runner.warm_up(capture_sizes, enforce_eager, quietly)

    def stepper(self, *, ahead: int = 2) -> Stepper:
        """Return what drives it. One at a time."""
        self.runner.reset()
        return Stepper(self.runner, num_blocks=self.num_blocks, block_size=self.block_size, ahead=ahead)
