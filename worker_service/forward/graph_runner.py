"""Record the forward of single queries once for each of some sizes, and replay it for steps that fit.

A step is filled up to the size of its graph with rows that write to the null block, see no keys and whose results
nobody looks at. All that changes from step to step lies in persistent tensors (``step_arrays``), so that a replay is
one call. Where attention cannot be part of a graph it runs between the pieces: queries are left in one buffer, which
all layers share since they follow each other, and the next piece reads the results from another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from service_chassis.telemetry import get_logger
from worker_service.attention.base import AttentionBackend, Graphs, KvLayer, StepAttention
from worker_service.forward.graph_sizes import GraphSizes
from worker_service.forward.recorder import Cut, Recorder, Recording
from worker_service.forward.step_arrays import StepArrays
from worker_service.input_batch import StepInput
from worker_service.kv_cache import KvCache
from worker_service.models.registry import Forward
from worker_service.runner import Progress


class GraphRunner:
    """The graphs of one model. Device thread."""

    def __init__(self, forward: Forward, attention: AttentionBackend, arrays: StepArrays, recorder: Recorder) -> None:
        self.sizes = GraphSizes(())
        self._forward = forward
        self._attention = attention
        self._arrays = arrays
        self._recorder = recorder
        self._recordings: dict[int, Recording] = {}
        self._hidden: Tensor | None = None  # [largest size, hidden_size], what all graphs write
        self._between = _AttentionBetween()

    def record(
        self, sizes: tuple[int, ...], make_step: Callable[[int], StepInput], kv: KvCache, progress: Progress
    ) -> None:
        """Record a graph of each size; those of before are forgotten.

        Args:
            sizes: the largest first.
            make_step: a step of so many single queries that touches nothing but the null block.
            kv: the cache that all replays will use; ``clear`` before it goes.
            progress: is told of each size.
        """
        self.clear()
        for index, size in enumerate(sizes):
            progress(index / len(sizes), f"graph of {size} rows, {index + 1} of {len(sizes)}")
            self._record_one(make_step(size), kv)
        self.sizes = GraphSizes(sizes)
        get_logger().info("graphs.recorded", sizes=sorted(sizes), kind=self._attention.graphs.value)

    def _record_one(self, step: StepInput, kv: KvCache) -> None:
        size = len(step.seq_lens)
        tensors = self._arrays.place(step, size)
        own = self._attention.begin(step, tensors)
        # Once outside of the recording: kernels are compiled and libraries set up.
        hidden = self._forward(tensors.input_ids, tensors.positions, tensors.slots, kv.layers, own)
        if self._hidden is None:
            self._hidden = torch.zeros_like(hidden)

        self._between.step, self._between.num_rows = own, size

        def work(cut: Cut) -> None:
            assert self._hidden is not None
            attention: StepAttention = own
            if self._attention.graphs is Graphs.PIECEWISE:
                attention = _CutAttention(self._between, cut, size)
            computed = self._forward(tensors.input_ids, tensors.positions, tensors.slots, kv.layers, attention)
            self._hidden[:size].copy_(computed)

        self._recordings[size] = self._recorder.record(work)

    def replay(self, size: int, step: StepInput) -> Tensor:
        """Return the hidden states of the step's rows; valid until the next step."""
        assert self._hidden is not None
        tensors = self._arrays.place(step, size)
        if self._attention.graphs is Graphs.PIECEWISE:
            self._between.step = self._attention.begin(step, tensors)
            self._between.num_rows = len(step.seq_lens)
        self._recordings[size].replay()
        return self._hidden[: len(step.seq_lens)]

    def clear(self) -> None:
        """Forget all graphs, and let their memory go."""
        self.sizes = GraphSizes(())
        self._recordings.clear()
        self._hidden = None
        self._between.clear()
        self._recorder.clear()


class _AttentionBetween:
    """Attention that runs between the pieces of a graph, for the rows that there are in the present step."""

    def __init__(self) -> None:
        self.step: StepAttention | None = None
        self.num_rows = 0
        self._query: Tensor | None = None  # [largest size, num_heads, head_dim]
        self._attended: Tensor | None = None  # zeros at first: padding rows read what nobody wrote

    def clear(self) -> None:
        self.step = self._query = self._attended = None

    def attend(self, cut: Cut, size: int, query: Tensor, kv: KvLayer, scale: float, window: int, cap: float) -> Tensor:
        if self._query is None or self._attended is None:
            # Contiguous, whatever the queries lie in.
            self._query = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
            self._attended = torch.zeros_like(self._query)
        queries, attended = self._query[:size], self._attended[:size]
        queries.copy_(query)

        def attend_now() -> None:
            assert self.step is not None
            count = self.num_rows
            self.step.attend(queries[:count], kv, scale, window, cap, out=attended[:count])

        cut(attend_now)
        return attended


class _CutAttention(StepAttention):
    """A ``StepAttention`` for the time of a recording."""

    def __init__(self, between: _AttentionBetween, cut: Cut, size: int) -> None:
        self._between = between
        self._cut = cut
        self._size = size

    def attend(
        self,
        query: Tensor,
        kv: KvLayer,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        attended = self._between.attend(self._cut, self._size, query, kv, scale, window, soft_cap)
        return attended if out is None else out.copy_(attended)
