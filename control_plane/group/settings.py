"""What a group is asked for, and what it turned out to be. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from service_chassis.ids import Epoch, Rank, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Everything a group needs to know of the configuration. Names and defaults as in ``ControlPlaneConfig``."""

    model: str
    dtype: str = "auto"
    quantization: str = "none"
    model_impl: str = "auto"
    max_model_len: int = 0  # 0: the model's
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_kv_blocks: int = 0  # 0: from memory
    kv_cache_memory_bytes: int = 0  # 0: from memory
    gpu_memory_utilization: float = 0.9
    max_steps_in_flight: int = 2
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    batch_invariant: bool = False
    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] = ()
    owner_address: str = ""

    report_interval_s: float = 0.1
    idle_report_interval_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    lease_s: float = 3.0
    step_timeout_s: float = 10.0
    startup_timeout_s: float = 600.0
    teardown_grace_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnRanks:
    """The model as rank 0 describes it. Fields as in ModelDescription of worker.proto."""

    source: str
    architecture: str
    vocab_size: int
    max_position: int
    dtype: str
    weight_bytes: int  # summed over ranks
    num_kv_groups: int
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What a formed group lives with until its end."""

    epoch: Epoch
    formation_id: str
    features: frozenset[str]  # of service_chassis.protocol.version, those that every rank has
    first_step: Step
    device: str
    backend: str
    model: ModelOnRanks
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int  # the null block included
    max_steps_in_flight: int
    num_speculative_tokens: int = 0  # 0 also where a rank lacks the feature
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    kv_bytes: int  # summed over ranks
    step_us_per_token: float  # of the slowest rank
    formed_in_s: float
    asleep: frozenset[str] = frozenset()  # memory that slept when the group was taken over
    weights_path: str = ""  # of weights that had replaced the model's own by then


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank, for GetStatus."""

    rank: Rank
    address: str
    pid: int
    incarnation_id: str
    connected: bool
    accepted: int
    completed: int
    running_step: int
    running_for_s: float
    silent_for_s: float
    busy: str
