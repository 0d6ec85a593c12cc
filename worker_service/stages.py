"""Bring a rank from nothing to ready: six stages, each a typed call, each visibly busy while it takes.

A stage runs on the device thread, to its end, whatever becomes of who asked for it; what the event loop keeps here is
where the rank is in its life.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from maniple.v1 import worker_pb2
from service_chassis.errors import InternalError, InvalidParameter, ManipleError, WrongState
from service_chassis.frozen_heap import freeze_heap
from service_chassis.protocol.failure_kinds import BROKEN_COLLECTIVE
from service_chassis.telemetry import get_logger
from worker_service.config import WorkerConfig
from worker_service.heartbeat import Busy, Failure, Vitals, failure_of
from worker_service.metrics import RankMemoryFacts
from worker_service.process_group import (
    OUTPUT_RANK,
    BrokenCollective,
    LoneProcessGroup,
    ProcessGroup,
    check_formation,
)
from worker_service.runner import LoadOptions, MemoryFacts, ModelFacts, ModelRunner, Progress
from worker_service.runners import make_runner
from worker_service.socket_group import FormationGivenUp, Patience, Rendezvous, SocketProcessGroup, form_socket_group
from worker_service.step_loop import StepLoop
from worker_service.steps import Steps

T = TypeVar("T")

# How long each stage may take before it counts as stuck. Generous: a load may read hundreds of GB from a network disk.
_UP_TO_S = {"form": 300.0, "load": 1800.0, "profile": 300.0, "allocate": 300.0, "capture": 900.0} | {
    "sleep": 900.0,
    "wake up": 1800.0,
    "update weights": 1800.0,
}


class Stages:
    """The stages of one rank. All methods run on the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        vitals: Vitals,
        step_loop: StepLoop,
        steps: Steps,
        on_failure: Callable[[Failure], None],
        check_epoch: Callable[[int], None],
    ) -> None:
        self.stage: worker_pb2.WorkerStage.ValueType = worker_pb2.WORKER_STAGE_UNSPECIFIED
        self.limits: worker_pb2.GroupLimits | None = None
        self.tasks: set[asyncio.Task[Any]] = set()  # stages under way
        self._config = config
        self._vitals = vitals
        self._step_loop = step_loop
        self._steps = steps
        self._on_failure = on_failure
        self._check_epoch = check_epoch
        self.weights_path = ""  # of weights that came after those of the load
        self._group: ProcessGroup | None = None
        self._rendezvous: Rendezvous | None = None  # on rank 0 of several, from the first Join on
        self._forming: Patience | None = None  # while this rank waits for the others
        self._given_up: ProcessGroup | None = None  # aborted under a stage whose owner is gone
        self._loaded: tuple[LoadOptions, ModelFacts] | None = None
        self._profiled: MemoryFacts | None = None
        self._graph_bytes = 0  # of the present formation
        self._kv_bytes = 0  # as they were allocated last
        self._lock = asyncio.Lock()  # stages run one after another, whoever asks

    @property
    def device(self) -> str:
        """What computes; before a model is loaded, what was asked for."""
        runner = self._step_loop.runner
        return runner.device if runner is not None else self._config.device

    @property
    def model(self) -> worker_pb2.ModelDescription | None:
        """The loaded model."""
        return _model_description(self._loaded[1]) if self._loaded is not None else None

    @property
    def step_us_per_token(self) -> float:
        """What the profile found; 0 before."""
        return self._profiled.step_us_per_token if self._profiled is not None else 0.0

    @property
    def backend(self) -> str:
        """How the ranks reach each other; nothing before FormGroup."""
        return self._group.backend if self._group is not None else ""

    @property
    def memory(self) -> RankMemoryFacts:
        """What is allocated here."""
        weight_bytes = self._loaded[1].weight_bytes if self._loaded is not None else 0
        return RankMemoryFacts(weight_bytes=weight_bytes, kv_bytes=self._kv_bytes if self.limits is not None else 0)

    @property
    def model_source(self) -> str:
        """Where the loaded model came from, or nothing."""
        return self._loaded[1].source if self._loaded is not None else ""

    def rendezvous(self) -> str:
        """Return where rank 0 waits for the others; nothing on other ranks, and with one rank."""
        if self._config.world_size == 1 or self._config.rank != OUTPUT_RANK:
            return ""
        listen, is_all_here = self._config.listen, self._config.is_all_here
        if self._rendezvous is None:
            # Behind a Unix socket everybody who matters is on this machine.
            is_local = is_all_here or listen.startswith("unix:")
            self._rendezvous = Rendezvous("127.0.0.1" if is_local else listen.rpartition(":")[0])
        return f"127.0.0.1:{self._rendezvous.port}" if is_all_here else f":{self._rendezvous.port}"

    def abort_collectives(self) -> None:
        """Have the device thread come back from a collective that will never end."""
        if self._forming is not None:
            self._forming.give_up()
        if self._group is not None:
            self._group.abort()

    def lose_owner(self) -> None:
        """Have a stage under way wait no longer for ranks that its owner may never have told of it.

        The next owner forms the group anew: only one that is ready is taken over as it is.
        """
        if self.tasks and self.stage not in (worker_pb2.WORKER_STAGE_READY, worker_pb2.WORKER_STAGE_FAILED):
            self._given_up = self._group
            self.abort_collectives()

    def leave_formation(self) -> None:
        """Drop the batch and the communicator; weights stay."""
        failure = self._vitals.failure
        if failure is not None and failure.kind == BROKEN_COLLECTIVE:
            self._vitals.failure = None  # another rank left first: what broke is what we leave
        self._steps.drop()
        self._step_loop.call(self._step_loop.forget_rows)
        self.abort_collectives()
        if self._steps.asleep or self.weights_path:
            # Another formation begins with what its owner asks for, awake.
            self._loaded = self._profiled = None
            self._steps.asleep, self.weights_path = frozenset(), ""
        self._group = None
        self.limits = None
        self._vitals.formation_id = ""
        self.stage = worker_pb2.WORKER_STAGE_UNSPECIFIED

    async def form_group(self, request: worker_pb2.FormGroupRequest) -> worker_pb2.FormGroupResponse:
        """Stage 1. Another formation than the present one begins anew, with the weights that are loaded."""

        async def form() -> worker_pb2.FormGroupResponse:
            if request.rank != self._config.rank:
                raise InvalidParameter("rank", request.rank, f"this is rank {self._config.rank}")
            if request.world_size != self._config.world_size:
                rule = f"this rank was started for {self._config.world_size}"
                raise InvalidParameter("world_size", request.world_size, rule)
            check_formation(request.formation_id, request.rank, request.world_size, request.rendezvous)
            if self._group is None or request.formation_id != self._group.formation_id:
                self.leave_formation()
                group = self._group = await self._form(request)
                self._vitals.formation_id = group.formation_id
                self.stage = worker_pb2.WORKER_STAGE_FORMED
                get_logger().info(
                    "group.formed",
                    formation_id=group.formation_id,
                    backend=group.backend,
                    world_size=group.world_size,
                    num_sharing=group.num_sharing,
                )
            return worker_pb2.FormGroupResponse(device=self.device, backend=self._group.backend)

        return await self._run(request.epoch, worker_pb2.WORKER_STAGE_UNSPECIFIED, worker_pb2.WORKER_STAGE_READY, form)

    async def _form(self, request: worker_pb2.FormGroupRequest) -> ProcessGroup:
        if request.world_size == 1:
            return LoneProcessGroup(request.formation_id)
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else _UP_TO_S["form"]
        patience = self._forming = Patience(timeout_s)

        def form(_: Progress) -> SocketProcessGroup:
            try:
                return form_socket_group(
                    request.formation_id,
                    request.rank,
                    request.world_size,
                    rendezvous=request.rendezvous,
                    listener=self._rendezvous,
                    patience=patience,
                )
            except FormationGivenUp:
                raise WrongState("the formation was given up while this rank waited for the others") from None
            finally:
                patience.close()

        try:
            return await self._on_device("form", form)
        finally:
            self._forming = None

    async def load_model(self, request: worker_pb2.LoadModelRequest) -> worker_pb2.LoadModelResponse:
        """Stage 2. What is loaded already is not loaded again."""
        options = LoadOptions(
            model=request.model,
            dtype=request.dtype or "auto",
            max_model_len=request.max_model_len,
            batch_invariant=request.batch_invariant,
            quantization=request.quantization or "none",
            model_impl=request.model_impl or "auto",
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=request.max_num_batched_tokens,
            block_size=request.block_size,
        )
        for field in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(options, field) < 1:
                raise InvalidParameter(field, getattr(options, field), "must be at least 1")

        async def load() -> worker_pb2.LoadModelResponse:
            started = time.monotonic()
            if self._loaded is None or self._loaded[0] != options:
                self._loaded = self._profiled = None
                self._loaded = options, await self._on_device("load", lambda progress: self._load(options, progress))
            else:
                await self._on_device("load", lambda _: self._join())
            facts, duration_s = self._loaded[1], time.monotonic() - started
            self.stage = worker_pb2.WORKER_STAGE_LOADED
            get_logger().info("model.loaded", architecture=facts.architecture, dtype=facts.dtype, duration_s=duration_s)
            return worker_pb2.LoadModelResponse(model=_model_description(facts), duration_s=duration_s)

        return await self._run(request.epoch, worker_pb2.WORKER_STAGE_FORMED, worker_pb2.WORKER_STAGE_PROFILED, load)

    def _load(self, options: LoadOptions, progress: Progress) -> ModelFacts:
        self._step_loop.runner = None  # the old weights go before the new ones come
        runner = make_runner(options.model, self._config)
        self._join(runner)
        facts = runner.load_model(options, progress)
        self._step_loop.runner = runner
        return facts

    def _join(self, runner: ModelRunner | None = None) -> None:
        """Put the runner into the formation: before it loads, since another rank may have its weights already."""
        assert self._group is not None
        (runner or self._runner).join(self._group)

    async def profile_memory(self, request: worker_pb2.ProfileMemoryRequest) -> worker_pb2.ProfileMemoryResponse:
        """Stage 3. Measured once per load: later a KV cache lies in the memory that would be measured."""
        utilization = request.gpu_memory_utilization or 0.9
        if not 0 < utilization <= 1:
            raise InvalidParameter("gpu_memory_utilization", utilization, "must be in (0, 1]")

        async def profile() -> worker_pb2.ProfileMemoryResponse:
            if self._profiled is None:
                self._profiled = await self._on_device("profile", lambda _: self._runner.profile_memory(utilization))
            self.stage = worker_pb2.WORKER_STAGE_PROFILED
            return worker_pb2.ProfileMemoryResponse(**dataclasses.asdict(self._profiled))

        return await self._run(request.epoch, worker_pb2.WORKER_STAGE_LOADED, worker_pb2.WORKER_STAGE_PROFILED, profile)

    async def allocate_kv_cache(self, request: worker_pb2.AllocateKvCacheRequest) -> worker_pb2.AllocateKvCacheResponse:
        """Stage 4. From here on there is a batch, empty, before step 1."""
        limits = request.limits

        async def allocate() -> worker_pb2.AllocateKvCacheResponse:
            assert self._loaded is not None
            _check_limits(limits, *self._loaded)
            kv_bytes = await self._on_device("allocate", lambda _: self._runner.allocate_kv_cache(limits.num_blocks))
            self._kv_bytes = kv_bytes
            self._steps.begin(limits, self._loaded[1])
            self.limits = limits
            self.stage = worker_pb2.WORKER_STAGE_ALLOCATED
            get_logger().info("kv_cache.allocated", num_blocks=limits.num_blocks, kv_bytes=kv_bytes)
            return worker_pb2.AllocateKvCacheResponse(kv_bytes=kv_bytes)

        return await self._run(
            request.epoch, worker_pb2.WORKER_STAGE_PROFILED, worker_pb2.WORKER_STAGE_ALLOCATED, allocate
        )

    async def warm_up(self, request: worker_pb2.WarmUpRequest) -> worker_pb2.WarmUpResponse:
        """Stage 5; with its end the rank is ready."""

        def capture(progress: Progress) -> int:
            graph_bytes = self._runner.warm_up(tuple(request.capture_sizes), request.enforce_eager, progress)
            freeze_heap()
            return graph_bytes

        async def warm_up() -> worker_pb2.WarmUpResponse:
            started = time.monotonic()
            if self.stage != worker_pb2.WORKER_STAGE_READY:
                self._graph_bytes = await self._on_device("capture", capture)
                self.stage = worker_pb2.WORKER_STAGE_READY
                self._steps.ready = True
            duration_s = time.monotonic() - started
            get_logger().info("rank.ready", duration_s=duration_s, graph_bytes=self._graph_bytes)
            return worker_pb2.WarmUpResponse(duration_s=duration_s, graph_bytes=self._graph_bytes)

        return await self._run(request.epoch, worker_pb2.WORKER_STAGE_ALLOCATED, worker_pb2.WORKER_STAGE_READY, warm_up)

    async def between_steps(
        self, what: str, epoch: int, after_step: int, work: Callable[[ModelRunner, Progress], T]
    ) -> T:
        """Do long work on a rank that is ready, behind the step that its owner names as the last (PROTOCOL B10)."""

        async def alone() -> T:
            accepted = self._vitals.accepted[0]
            if after_step != accepted:
                raise WrongState(f"after_step is {after_step}, and the rank has accepted step {accepted}")
            return await self._on_device(what, lambda progress: work(self._runner, progress))

        return await self._run(epoch, worker_pb2.WORKER_STAGE_READY, worker_pb2.WORKER_STAGE_READY, alone)

    @property
    def _runner(self) -> ModelRunner:
        runner = self._step_loop.runner
        assert runner is not None, "the stages come in order"
        return runner

    async def _run(
        self,
        epoch: int,
        first: worker_pb2.WorkerStage.ValueType,
        last: worker_pb2.WorkerStage.ValueType,
        body: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Run one stage to its end, whatever becomes of the caller: the device cannot be interrupted half way.

        Args:
            epoch: of the call. It may have waited for a stage that another owner began, and be stale by now.
            first: the rank must have come so far.
            last: and no farther; a stage that was done is repeated where its answer may have been lost.
            body: the stage.
        """

        async def alone() -> T:
            async with self._lock:
                self._check_epoch(epoch)
                if self._vitals.failure is not None:
                    raise WrongState(f"the rank failed: {self._vitals.failure.message}")
                if not first <= self.stage <= last:
                    name = worker_pb2.WorkerStage.Name
                    needed = name(first) if first == last else f"{name(first)} to {name(last)}"
                    raise WrongState(f"this call needs {needed}, and the rank is at {name(self.stage)}")
                return await body()

        task = asyncio.create_task(alone())
        self._keep(task)
        return await asyncio.shield(task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        # A caller that went away leaves nobody to take the exception; it was logged where it arose.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _on_device(self, what: str, work: Callable[[Progress], T]) -> T:
        """Do long work on the device thread, visibly busy. An unknown exception is the rank's failure."""
        group = self._group
        busy = Busy(what, _UP_TO_S[what], time.monotonic())

        def progress(share: float, detail: str) -> None:
            self._vitals.busy = dataclasses.replace(busy, progress=share, detail=detail)

        self._vitals.busy = busy
        self._vitals.announce()
        try:
            done = await asyncio.wrap_future(self._step_loop.call(lambda: work(progress)))
        except ManipleError:
            raise
        except Exception as error:
            if isinstance(error, BrokenCollective) and group is not None and group is self._given_up:
                raise WrongState(f"{what}: the owner was replaced while this rank waited for the others") from None
            crash = InternalError()
            get_logger().error("stage.failed", what=what, incident_id=crash.incident_id, exc_info=error)
            failure = failure_of(error, doing=what)
            self._on_failure(failure)
            # Its reader is the owner, who has to say which rank failed of what.
            crash.message = f"{failure.kind}: {failure.message} (incident {crash.incident_id})"
            raise crash from error
        finally:
            self._vitals.busy = None
            self._vitals.announce()
        if self._group is not group:
            raise WrongState(f"{what}: the formation was left meanwhile")
        return done


def _model_description(facts: ModelFacts) -> worker_pb2.ModelDescription:
    return worker_pb2.ModelDescription(**dataclasses.asdict(facts))


def _check_limits(limits: worker_pb2.GroupLimits, loaded: LoadOptions, facts: ModelFacts) -> None:
    for field, least in (("num_blocks", 2), ("max_model_len", 1), ("max_steps_in_flight", 1)):
        if getattr(limits, field) < least:
            raise InvalidParameter(f"limits.{field}", getattr(limits, field), f"must be at least {least}")
    for field in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        if getattr(limits, field) != getattr(loaded, field):
            rule = f"must be the {getattr(loaded, field)} that the model was loaded for"
            raise InvalidParameter(f"limits.{field}", getattr(limits, field), rule)
    if limits.num_speculative_tokens:
        if limits.max_steps_in_flight != 1:
            rule = "must be 1 with num_speculative_tokens: what a step accepted is known with its result"
            raise InvalidParameter("limits.max_steps_in_flight", limits.max_steps_in_flight, rule)
        if not 1 <= limits.prompt_lookup_min <= limits.prompt_lookup_max:
            rule = f"must be 1 to prompt_lookup_max {limits.prompt_lookup_max}"
            raise InvalidParameter("limits.prompt_lookup_min", limits.prompt_lookup_min, rule)
    longest = loaded.max_model_len or facts.max_position
    if limits.max_model_len > longest:
        rule = f"must be at most the {longest} that the model was loaded for"
        raise InvalidParameter("limits.max_model_len", limits.max_model_len, rule)
