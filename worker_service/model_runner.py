"""Run one rank's model: load, measure, allocate, and step by step prepare, compute, sample.

House rules of this file:
- Architecture-neutral: what differs by architecture lives in ``models/``, what differs by device in ``platforms/``.
- Everything runs on the one device thread, in the order of the calls. No locks, no awaits.
- A step does work in proportion to its tokens and rows, never to the length of contexts or to the rows that it leaves
  out. Whatever can be kept between steps is kept in the input batch.
- Host bookkeeping is numpy, vectorised over rows; a Python loop over rows needs a reason.
- A row's tokens depend on that row alone. Nothing here may look at its mates.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from maniple_kernels.gumbel import gumbel_argmax
from maniple_kernels.paged_attention import plan_attention
from service_chassis.protocol.logprobs import Logprobs
from worker_service.input_batch import InputBatch, StepInput
from worker_service.kv_cache import KvCache, KvCacheSpec
from worker_service.memory import KvDemand, plan_memory
from worker_service.models.registry import Model, load_model
from worker_service.platforms.choose import choose_platform
from worker_service.pooling import Float64Array, Pooler
from worker_service.process_group import OUTPUT_RANK, LoneProcessGroup, ProcessGroup
from worker_service.runner import LoadOptions, MemoryFacts, ModelFacts, Progress
from worker_service.sampling.logprobs import PROMPT_SLICE, StepLogprobs
from worker_service.sampling.masked_rows import MaskedRows, of_sampled
from worker_service.sampling.sampler import Sampler, check_finite
from worker_service.sampling.tensor_logprobs import report_tensors
from worker_service.step_work import (
    NOT_SAMPLED,
    RAW_LOGITS,
    Float32Array,
    Int32Array,
    Mode,
    RowLogprobs,
    StepOutput,
    StepWork,
)
from worker_service.tensor_group import TensorGroup

_NOTHING_SAMPLED = np.zeros(0, np.int32)


class TorchModelRunner:
    """A ``worker_service.runner.ModelRunner`` on torch."""

    # Set by the stages, in this order; None before.
    _model: Model | None = None
    _spec: KvCacheSpec | None = None
    _batch: InputBatch | None = None
    _kv: KvCache | None = None

    def __init__(
        self,
        *,
        device: str = "auto",
        rank: int = 0,
        world_size: int = 1,
        first_device: int = 0,
        num_threads: int = 0,
        num_groups_sharing: int = 1,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._platform = choose_platform(
            device, index=first_device + rank, num_threads=num_threads, num_groups_sharing=num_groups_sharing
        )
        self._tensors = TensorGroup(self._platform.device)
        self._group: ProcessGroup = LoneProcessGroup("")
        self._pooler = Pooler()
        self._masked = MaskedRows()

    @property
    def device(self) -> str:
        """Cpu or cuda."""
        return self._platform.name

    def join(self, group: ProcessGroup) -> None:
        self._group = group
        self._platform.share(group.num_sharing)
        self._platform.bind()
        self._tensors.join(group)

    def load_model(self, options: LoadOptions, progress: Progress) -> ModelFacts:
        self._platform.bind()
        model, dtype, max_model_len = load_model(
            options, self._platform, self._rank, self._world_size, progress, self._tensors
        )
        config = model.config
        self._model, self._options, self._max_model_len = model, options, max_model_len
        self._spec = KvCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=config.head_dim,
            block_size=options.block_size,
            dtype=dtype,
        )
        self._batch = InputBatch(
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            block_size=options.block_size,
            vocab_size=config.vocab_size,
        )
        self._sampler = Sampler(self._batch)
        return ModelFacts(
            source=options.model,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_position=config.max_position,
            dtype=str(dtype).removeprefix("torch."),
            weight_bytes=model.weight_bytes,
            block_bytes=self._spec.block_bytes,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
        )

    def profile_memory(self, gpu_memory_utilization: float) -> MemoryFacts:
        assert self._model is not None
        assert self._spec is not None
        self._kv = None  # of an earlier formation
        self._platform.bind()
        # The dummies read and write the null block alone.
        cache = KvCache(self._spec, 1, self._platform.device)
        self._run_dummy(cache, [1])  # first uses: compiled kernels, thread pools
        before = self._platform.memory()
        self._platform.measure_peak()
        budget = min(self._options.max_num_batched_tokens, self._max_model_len)
        started = time.perf_counter()
        self._run_dummy(cache, [budget])
        duration_s = time.perf_counter() - started
        return plan_memory(
            self._platform,
            before=before,
            peak_bytes=self._platform.peak(),
            weight_bytes=self._model.weight_bytes,
            utilization=gpu_memory_utilization,
            demand=KvDemand(
                block_bytes=self._spec.block_bytes,
                block_size=self._spec.block_size,
                max_num_seqs=self._options.max_num_seqs,
                max_model_len=self._max_model_len,
            ),
            step_us_per_token=duration_s * 1e6 / budget,
        )

    def allocate_kv_cache(self, num_blocks: int) -> int:
        assert self._spec is not None
        self._kv = None  # let the old one go before the new one comes
        self._kv = KvCache(self._spec, num_blocks, self._platform.device)
        return self._kv.num_bytes

    def warm_up(self, capture_sizes: tuple[int, ...], enforce_eager: bool, progress: Progress) -> None:
        assert self._kv is not None
        largest = min(self._options.max_num_seqs, self._options.max_num_batched_tokens)
        sizes = sorted({size for size in (*capture_sizes, 1, 8, 32) if size <= largest}, reverse=True)
        for index, size in enumerate(sizes):
            progress(index / len(sizes), f"decode of {size} rows")
            self._run_dummy(self._kv, [1] * size)

    def apply(self, work: StepWork) -> None:
        assert self._batch is not None
        if work.block_copies:
            assert self._kv is not None
            # Rows and tables are host state that the copies do not read: the order among the two does not matter.
            self._kv.copy_blocks(work.block_copies)
        self._masked.apply(work, self._batch.num_tokens)
        self._batch.apply(work)
        self._pooler.apply(work)

    def execute(self, work: StepWork) -> StepOutput:
        assert self._batch is not None
        assert self._kv is not None
        started = time.perf_counter()
        sampled = _NOTHING_SAMPLED
        logprobs: tuple[RowLogprobs, ...] = ()
        vectors: tuple[Float32Array, ...] = ()
        if work.mode is Mode.RUN and len(work.rows):
            with torch.inference_mode():
                sampled, logprobs, vectors = self._run(work, self._batch, self._kv)
        return StepOutput(
            step=work.step,
            token_ids=sampled,
            token_digest=self._batch.token_digest,
            device_us=int((time.perf_counter() - started) * 1e6),
            vectors=vectors,
            logprobs=logprobs,
        )

    def _run(
        self, work: StepWork, batch: InputBatch, kv: KvCache
    ) -> tuple[Int32Array, tuple[RowLogprobs, ...], tuple[Float32Array, ...]]:
        """Return what rows sample, log-probabilities, and on the output rank the vectors of rows that pool."""
        hidden = self._forward(batch.prepare(work), kv)
        vectors = self._pool(work, hidden)
        rows = work.rows[work.samples]
        telling = StepLogprobs(batch.sampling.logprobs, work, batch.num_prompt_tokens)
        prompts = self._prompt_logprobs(telling, batch, hidden)
        if len(rows) == 0 and not telling.spans:
            return _NOTHING_SAMPLED, (), vectors
        if len(hidden) > len(rows):
            last = np.cumsum(work.num_scheduled_tokens)[work.samples] - 1
            hidden = hidden[self._on_device(last)]
        logits = self._compute_logits(hidden) if len(rows) else None
        sampled, logprobs = self._agree(logits, work, batch, telling, prompts)
        self._masked.follow(rows, sampled)
        given = sampled != NOT_SAMPLED
        batch.append(rows[given], sampled[given])
        return sampled, of_sampled(rows, sampled, logprobs), vectors

    def _prompt_logprobs(self, telling: StepLogprobs, batch: InputBatch, hidden: Tensor) -> list[Logprobs]:
        """Report on the positions of prompts that are told with this step, a slice at a time; on rank 0."""
        model = self._model
        assert model is not None
        found = []
        for span in telling.spans:
            columns = Logprobs(span.num_likeliest + 1)
            for start, stop in span.slices():
                logits = model.logits(hidden[span.first_place + start : span.first_place + stop])
                if logits is not None:
                    first = span.first_position + start
                    check_finite(logits, lambda place: f"row {span.req_index}, position {first + place}")  # noqa: B023
                    tokens = batch.token_ids[span.req_index, first : span.first_position + stop]
                    said = report_tensors(logits, tokens, span.num_likeliest, span.mode != RAW_LOGITS)
                    columns.extend(said.columns(0, stop - start, span.num_likeliest))
            found.append(columns)
        return found

    def _pool(self, work: StepWork, hidden: Tensor) -> tuple[Float32Array, ...]:
        """Pool hidden states where they are asked for: all ranks have them, the output rank answers."""
        if self._group.rank != OUTPUT_RANK:
            return ()
        model = self._model
        assert model is not None
        starts = np.cumsum(work.num_scheduled_tokens) - work.num_scheduled_tokens - work.num_computed_tokens

        def sum_of(place: int, start: int, stop: int) -> Float64Array:
            first = int(starts[place])
            return model.final_hidden(hidden[first + start : first + stop]).double().sum(dim=0).cpu().numpy()

        return self._pooler.take(work, sum_of)

    def _agree(
        self,
        logits: Tensor | None,
        work: StepWork,
        batch: InputBatch,
        telling: StepLogprobs,
        prompts: list[Logprobs],
    ) -> tuple[Int32Array, tuple[RowLogprobs, ...]]:
        """Have rank 0, which has the logits, decide the tokens of the rows and tell the others, who keep it all too."""
        own = b""
        if self._group.rank == OUTPUT_RANK:
            rows, sampled, told = work.rows[work.samples], _NOTHING_SAMPLED, {}
            if logits is not None:
                self._masked.await_masks(work, batch.sampling)
                sampled = self._sampler.sample(logits, rows, telling.output)
                told = telling.output.take(sampled, report_tensors)
            own = telling.to_bytes(self._masked.decide(rows, sampled), told, prompts)
        return telling.from_bytes(self._group.broadcast(own))

    def _forward(self, step: StepInput, kv: KvCache) -> Tensor:
        """Return the hidden state of every token of the step."""
        assert self._model is not None
        plan = plan_attention(step.block_tables, step.query_start_loc, step.seq_lens, torch.get_num_threads())
        return self._model.forward(
            self._on_device(step.input_ids),
            self._on_device(step.positions),
            self._on_device(step.slot_mapping),
            kv.layers,
            plan,
        )

    def _compute_logits(self, hidden: Tensor) -> Tensor | None:
        assert self._model is not None
        return self._model.logits(hidden)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._platform.device, non_blocking=True)

    def _run_dummy(self, kv: KvCache, counts: list[int]) -> None:
        """Compute a step of fresh requests with so many tokens each, in the null block."""
        assert self._model is not None
        num_tokens = sum(counts)
        step = StepInput(
            input_ids=np.zeros(num_tokens, np.int32),
            positions=np.concatenate([np.arange(count) for count in counts]),
            slot_mapping=np.zeros(num_tokens, np.int64),
            query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
            seq_lens=np.array(counts, np.int32),
            block_tables=np.zeros((len(counts), -(-max(counts) // self._options.block_size)), np.int32),
        )
        with torch.inference_mode():
            hidden = self._forward(step, kv)
            logits = self._compute_logits(hidden[: max(self._options.max_num_seqs, PROMPT_SLICE)])
            if logits is not None:
                # A model that computes nonsense of nothing is refused before it serves anybody.
                check_finite(logits, lambda place: "already before the first request; are its weights what they seem?")
                logits.argmax(dim=-1)
            if logits is not None and self._platform.device.type == "cpu":
                gumbel_argmax(logits, np.zeros((len(logits), 2), np.uint32))
        self._platform.synchronize()

    def known_tokens(self, req_index: int) -> list[int]:
        assert self._batch is not None
        return self._batch.known_tokens(req_index)

    def reset(self) -> None:
        if self._batch is not None:
            self._batch.reset()
        self._pooler.clear()
        self._masked.clear()
