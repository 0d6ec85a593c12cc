"""What the step loop needs of whatever computes: the torch model runner or the scripted model.

All methods are called from the one device thread, in the order of the six stages, and may block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from worker_service.pending_step import PendingStep
from worker_service.process_group import ProcessGroup
from worker_service.step_work import StepOutput, StepWork

Progress = Callable[[float, str], None]  # (share done in [0, 1], what for people)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model once its configuration is read. Fields as in ModelDescription of worker.proto."""

    source: str
    architecture: str
    vocab_size: int
    max_position: int
    dtype: str
    weight_bytes: int
    block_bytes: int
    hidden_size: int
    num_layers: int
    num_kv_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What the profile found, in bytes. Fields as in ProfileMemoryResponse of worker.proto."""

    kv_bytes: int
    weight_bytes: int
    activation_bytes: int
    total_bytes: int
    foreign_bytes: int
    base_bytes: int
    free_bytes: int
    step_us_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Fields of LoadModelRequest."""

    model: str
    dtype: str = "auto"
    max_model_len: int = 0  # 0: the model's
    batch_invariant: bool = False
    quantization: str = "none"  # none, int8, q4
    model_impl: str = "auto"  # auto, native, transformers
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16


class ModelRunner(Protocol):
    """One device's model, KV cache and persistent input batch."""

    @property
    def device(self) -> str:
        """cpu, cuda or scripted."""

    def join(self, group: ProcessGroup) -> None:
        """Compute with the ranks of a newly formed group from now on. Before ``load_model``, and for each formation.

        Every rank does this at the same stage, so collectives are allowed.
        """

    def load_model(self, options: LoadOptions, progress: Progress) -> ModelFacts:
        """Read this rank's shard. Raises ``InvalidParameter`` for a model or dtype that cannot be served."""

    def profile_memory(self, gpu_memory_utilization: float) -> MemoryFacts:
        """Run one dummy forward at the token budget and say what is left for KV."""

    def allocate_kv_cache(self, num_blocks: int) -> int:
        """Allocate ``num_blocks`` blocks, the null block included; return their bytes."""

    def warm_up(self, capture_sizes: tuple[int, ...], enforce_eager: bool, progress: Progress) -> int:
        """Compile and capture, then leave no trace in the KV cache. Returns the bytes that graphs take.

        Args:
            capture_sizes: rows of the steps to record; empty: the runner's choice.
            enforce_eager: record nothing.
            progress: is told how far it is.
        """

    def apply(self, work: StepWork) -> None:
        """Apply the bookkeeping of a delta: rows that leave, enter and change, block copies. First half of a step."""

    def execute(self, work: StepWork) -> StepOutput | PendingStep:
        """Compute and sample the step whose bookkeeping was just applied. Only for RUN and DUMMY.

        Returns:
            What came out; or the step as it was launched, where the device goes on with it by itself. The next work is
            applied before that is settled only if it admits it.
        """

    def known_tokens(self, req_index: int) -> list[int]:
        """Return all known tokens of a live row: given and sampled."""

    def reset(self) -> None:
        """Forget all rows; keep weights and KV memory (RELEASE)."""

    # Sleep and other weights: between steps, once all stages are done

    @property
    def asleep(self) -> frozenset[str]:
        """What sleeps, of "weights" and "kv_cache"."""

    def taken_bytes(self) -> int:
        """Return the memory that this rank takes now: of its device, or as a process."""

    def sleep(self, level: int) -> int:
        """Give memory back, as far as it is awake; return its bytes. The KV cache reads as zeros when it wakes.

        Args:
            level: 1: weights are kept elsewhere. 2: they are read from their source again when they wake.

        Raises:
            WrongState: the worker was not started for this, or there is no place for the weights; nothing was changed.
        """

    def wake_up(self, tags: Collection[str], progress: Progress) -> None:
        """Take memory again for what ``tags`` name and sleeps.

        Raises:
            WrongState: it is not there to be had; what is not awake yet sleeps on.
        """

    def stage_weights(self, path: str, progress: Progress) -> int:
        """Read another checkpoint beside the weights that serve; return the number of its tensors.

        Raises:
            InvalidParameter: it is not one of this model.
            WrongState: there is no memory for it.
        """

    def put_staged_weights(self) -> None:
        """Put what was staged in place of the weights; they are awake then."""

    def unstage_weights(self) -> None:
        """Let go of what was staged, if anything was."""
