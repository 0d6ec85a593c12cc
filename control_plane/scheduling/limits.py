"""What one group can hold, as far as the scheduler must know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Fixed for the life of a group. Whoever builds it has checked the configuration."""

    max_num_seqs: int
    max_num_batched_tokens: int
    """At least ``max_num_seqs``, so that every row can take part in every step."""
    max_model_len: int
    block_size: int
    num_blocks: int
    """The null block included."""
    max_steps_in_flight: int = 2
    max_num_waiting: int = 1024
    """Requests that were in no delta yet."""
    max_new_row_bytes: int = 16 << 20
    """What the rows that enter in one step may add to its delta, which must fit into a message. One always may."""
    max_result_entries: int = 1 << 17
    """What prefills may add to the result of one step, some nine bytes each, all of which must fit into its message."""
    max_vectors: int = 64
    """Vectors that one step may complete, all of which must fit into the message with its result."""
    num_speculative_tokens: int = 0
    """Tokens that a decode row may try ahead in one step. Then one is in flight: the next needs to know its outcome."""

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.max_num_seqs >= 1
        assert self.max_model_len >= 2
        assert self.num_blocks >= 2
        assert not self.num_speculative_tokens or self.max_steps_in_flight == 1
        assert min(self.block_size, self.max_steps_in_flight, self.max_vectors, self.max_result_entries) >= 1
