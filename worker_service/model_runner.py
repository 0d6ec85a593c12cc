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

import contextlib
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from maniple_kernels.compile_ahead import compiling_ahead
from service_chassis.errors import InvalidParameter
from service_chassis.kernel_rules import TUNE_NEEDS_GPU
from worker_service.attention.base import AttentionSpec, Tunable
from worker_service.forward.assemble import ForwardOptions, assemble_forward
from worker_service.forward.compile_rule import compile_rule
from worker_service.forward.forward_pass import ForwardPass, dummy_step
from worker_service.forward.graph_sizes import default_sizes, sizes_to_record
from worker_service.forward.launched_step import LaunchedStep
from worker_service.forward.step_outputs import Said, StepOutputs
from worker_service.input_batch import InputBatch
from worker_service.kv_cache import KvCache, KvCacheSpec
from worker_service.memory import KvDemand, plan_memory
from worker_service.models.config import load_config
from worker_service.models.registry import DTYPES, NATIVE, Model, implementation_of, load_model
from worker_service.out_of_memory import explaining_memory
from worker_service.pending_step import PendingStep
from worker_service.platforms.choose import choose_platform
from worker_service.process_group import LoneProcessGroup, ProcessGroup
from worker_service.runner import LoadOptions, MemoryFacts, ModelFacts, Progress
from worker_service.sampling.choose import LaunchingSampler
from worker_service.sampling.logprobs import PROMPT_SLICE
from worker_service.sampling.sampler import check_finite
from worker_service.sleep.backend import KV_CACHE, WEIGHTS
from worker_service.sleep.choose import SleepOptions, choose_backend
from worker_service.sleep.renewal import Anew, InPlace
from worker_service.sleep.sleeping_memory import SleepingMemory
from worker_service.speculation.tries import with_tries
from worker_service.step_work import Mode, StepOutput, StepWork
from worker_service.tensor_group import TensorGroup


class TorchModelRunner:
    """A ``worker_service.runner.ModelRunner`` on torch."""

    # Set by the stages, in this order; None before.
    _model: Model | None = None
    _spec: KvCacheSpec | None = None
    _batch: InputBatch | None = None
    _forward: ForwardPass | None = None
    _outputs: StepOutputs | None = None
    _kv: KvCache | None = None
    _launches = False  # steps need not be waited for

    def __init__(
        self,
        *,
        device: str = "auto",
        rank: int = 0,
        world_size: int = 1,
        first_device: int = 0,
        device_id: int | None = None,
        num_threads: int = 0,
        num_groups_sharing: int = 1,
        forward: ForwardOptions | None = None,
        sleep: SleepOptions | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._platform = choose_platform(
            device,
            index=first_device + rank,
            device_id=device_id,
            num_threads=num_threads,
            num_groups_sharing=num_groups_sharing,
        )
        self._tensors = TensorGroup(self._platform.device)
        self._group: ProcessGroup = LoneProcessGroup("")
        self._forward_options = forward or ForwardOptions()
        on_cpu = self._platform.device.type == "cpu"
        self._memory = SleepingMemory(
            self._platform,
            choose_backend(sleep.backend, self._platform.device, sleep.directory) if sleep is not None else None,
            Anew(self._load_weights) if on_cpu else InPlace(),
        )
        self._warmed_up: tuple[tuple[int, ...], bool] = ((), False)

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
        implementation = implementation_of(options)
        compiler = self._forward_options.compiler
        if rule := compile_rule(compiler, self._platform.device, self._world_size, implementation):
            raise InvalidParameter("torch_compile", True, rule)
        if self._forward_options.tune_kernels and self._platform.device.type == "cpu":
            raise InvalidParameter("tune_kernels", True, TUNE_NEEDS_GPU)
        with (
            explaining_memory("load", self._platform, dict, ("model", options.model)),
            self._memory.region(WEIGHTS),
            compiling_ahead(self._compiled_for(options, implementation)) as finish_compiling,
        ):
            model, dtype, max_model_len = load_model(
                options, self._platform, self._rank, self._world_size, progress, self._tensors
            )
            progress(1.0, "kernels are compiled")
            finish_compiling()
        self._memory.began(options.model)
        config = model.config
        self._model, self._options, self._max_model_len = model, options, max_model_len
        attention = AttentionSpec(
            device=self._platform.device,
            dtype=dtype,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self._forward = assemble_forward(model, attention, self._forward_options)
        self._spec = KvCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=options.block_size,
            dtype=dtype,
            layout=self._forward.attention.layout,
        )
        self._batch = InputBatch(
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            block_size=options.block_size,
            vocab_size=config.vocab_size,
        )
        self._outputs = StepOutputs(model, self._batch, self._platform.device)
        sampler = self._outputs.sampler
        # Ranks agree on what was sampled through the host, so several of them go step by step.
        self._launches = (
            self._world_size == 1 and isinstance(sampler, LaunchingSampler) and self._forward.follow(sampler.latest)
        )
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

    def _compiled_for(self, options: LoadOptions, implementation: str) -> torch.dtype | None:
        """Return the type of weights that kernels are compiled for while they come; None: for none."""
        is_plain = implementation == NATIVE and options.quantization == "none"
        if self._platform.device.type != "cpu" or self._world_size > 1 or not is_plain:
            return None
        if options.dtype != "auto":
            return DTYPES.get(options.dtype)
        try:
            return DTYPES.get(load_config(Path(options.model)).dtype)
        except InvalidParameter:  # which the load raises, too
            return None

    def profile_memory(self, gpu_memory_utilization: float) -> MemoryFacts:
        assert self._model is not None
        assert self._spec is not None
        self._forget_graphs()
        self._kv = None  # of an earlier formation
        self._platform.bind()
        if rule := self._platform.share_rule(gpu_memory_utilization):
            raise InvalidParameter("gpu_memory_utilization", gpu_memory_utilization, rule)
        budget = min(self._options.max_num_batched_tokens, self._max_model_len)
        with self._explaining("profile", ("max_num_batched_tokens", self._options.max_num_batched_tokens)):
            # The dummies read and write the null block alone.
            cache = KvCache(self._spec, 1, self._platform.device)
            self._run_dummy(cache, [1])  # first uses: compiled kernels, thread pools
            before = self._platform.memory()
            self._platform.measure_peak()
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
        self._forget_graphs()
        self._kv = None  # let the old one go before the new one comes
        with self._explaining("allocate", ("num_kv_blocks", num_blocks)), self._memory.region(KV_CACHE):
            self._kv = KvCache(self._spec, num_blocks, self._platform.device)
        return self._kv.num_bytes

    def _explaining(
        self, doing: str, refused: tuple[str, object] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Explain memory that runs out, by what this rank holds."""
        return explaining_memory(doing, self._platform, self._held, refused)

    def _held(self) -> dict[str, int]:
        """Return bytes by what holds them."""
        return {
            "weights": self._model.weight_bytes if self._model is not None else 0,
            "KV cache": self._kv.num_bytes if self._kv is not None else 0,
        }

    def warm_up(self, capture_sizes: tuple[int, ...], enforce_eager: bool, progress: Progress) -> int:
        with self._explaining("capture", ("max_num_seqs", self._options.max_num_seqs)):
            return self._warm_up(capture_sizes, enforce_eager, progress)

    def _warm_up(self, capture_sizes: tuple[int, ...], enforce_eager: bool, progress: Progress) -> int:
        assert self._kv is not None
        assert self._forward is not None
        self._warmed_up = (capture_sizes, enforce_eager)
        kv, block_size = self._kv, self._options.block_size
        if self._forward_options.tune_kernels and isinstance(self._forward.attention, Tunable):
            progress(0.0, "kernels are measured")
            self._forward.attention.tune()
        largest = min(self._options.max_num_seqs, self._options.max_num_batched_tokens)
        graphs = self._forward.graphs
        if graphs is None or enforce_eager:
            # On a device the kernels that merge the parts of attention differ by how many parts there are.
            usual = (1, 8, 32) if self._platform.device.type == "cpu" else default_sizes(largest)
            sizes = sorted({size for size in (*capture_sizes, *usual) if size <= largest}, reverse=True)
            for index, size in enumerate(sizes):
                progress(index / len(sizes), f"decode of {size} rows")
                self._run_dummy(kv, [1] * size)
            return 0
        before = self._platform.memory().own
        with torch.inference_mode():
            graphs.record(
                sizes_to_record(capture_sizes, largest), lambda size: dummy_step([1] * size, block_size), kv, progress
            )
        self._run_dummy(kv, [1] * largest)  # what follows a forward, at its widest
        return max(0, self._platform.memory().own - before)

    def _forget_graphs(self) -> None:
        """Before the cache that they were recorded with goes."""
        if self._forward is not None and self._forward.graphs is not None:
            self._forward.graphs.clear()

    def apply(self, work: StepWork) -> None:
        assert self._batch is not None
        assert self._outputs is not None
        if work.block_copies:
            assert self._kv is not None
            # Rows and tables are host state that the copies do not read: the order among the two does not matter.
            self._kv.copy_blocks(work.block_copies)
        self._outputs.apply(work)
        self._batch.apply(work)

    def execute(self, work: StepWork) -> StepOutput | PendingStep:
        assert self._batch is not None
        if self._launches and work.mode is Mode.RUN and len(work.rows):
            assert self._outputs is not None
            if self._outputs.is_plain(work):
                return self._launch(work, self._batch, self._outputs)
        started = time.perf_counter()
        said, sampling_ns = Said(), 0
        if work.mode is Mode.RUN and len(work.rows):
            assert self._forward is not None
            assert self._outputs is not None
            assert self._kv is not None
            with torch.inference_mode(), self._explaining("step"):
                work = with_tries(work, self._batch)
                step = replace(self._batch.prepare(work), wanted=self._outputs.wanted(work))
                hidden = self._forward(step, self._kv)
                sampling_ns = time.monotonic_ns()
                said = self._outputs.take(work, hidden, self._group)
        return StepOutput(
            step=work.step,
            token_ids=said.token_ids,
            token_digest=self._batch.token_digest,
            device_us=int((time.perf_counter() - started) * 1e6),
            sampling_ns=sampling_ns,
            vectors=said.vectors,
            logprobs=said.logprobs,
            num_tokens=said.num_tokens,
        )

    def _launch(self, work: StepWork, batch: InputBatch, outputs: StepOutputs) -> LaunchedStep:
        assert self._forward is not None
        assert self._kv is not None
        with torch.inference_mode(), self._explaining("step"):
            outcome = outputs.launch(work, self._forward(batch.prepare(work), self._kv))
        return LaunchedStep(work, batch, outcome, admits=outputs.is_plain, check=self._tensors.check)

    def _run_dummy(self, kv: KvCache, counts: list[int]) -> None:
        """Compute a step of fresh requests with so many tokens each, in the null block."""
        assert self._forward is not None
        assert self._outputs is not None
        with torch.inference_mode():
            hidden = self._forward(dummy_step(counts, self._options.block_size), kv)
            logits = self._outputs.compute_logits(hidden[: max(self._options.max_num_seqs, PROMPT_SLICE)])
            if logits is not None:
                # A model that computes nonsense of nothing is refused before it serves anybody.
                check_finite(logits, lambda place: "already before the first request; are its weights what they seem?")
                self._outputs.sampler.warm_up(logits)
        self._platform.synchronize()

    def known_tokens(self, req_index: int) -> list[int]:
        assert self._batch is not None
        return self._batch.known_tokens(req_index)

    def reset(self) -> None:
        if self._batch is not None:
            self._batch.reset()
        if self._outputs is not None:
            self._outputs.clear()

    # Sleep, and other weights: decided in worker_service.sleep

    @property
    def asleep(self) -> frozenset[str]:
        return self._memory.asleep

    def taken_bytes(self) -> int:
        return self._platform.memory().own

    def sleep(self, level: int) -> int:
        assert self._model is not None
        return self._memory.sleep(level, self._model, self._kv, world_size=self._world_size)

    def wake_up(self, tags: Collection[str], progress: Progress) -> None:
        assert self._model is not None
        if self._memory.wake_up(tags, self._model, progress):
            self._forget_graphs()
            self.warm_up(*self._warmed_up, progress)

    def stage_weights(self, path: str, progress: Progress) -> int:
        assert self._model is not None
        return self._memory.stage(path, self._model, progress)

    def put_staged_weights(self) -> None:
        self._memory.put_staged()

    def unstage_weights(self) -> None:
        self._memory.unstage()

    def _load_weights(self, path: str, progress: Progress) -> Model:
        with self._memory.region(WEIGHTS):
            model, _, _ = load_model(
                replace(self._options, model=path),
                self._platform,
                self._rank,
                self._world_size,
                progress,
                self._tensors,
            )
        return model
