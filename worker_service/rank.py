"""One rank: everything WorkerService can be asked, without a transport.

``servicer`` puts gRPC in front of it, the executor ``uni`` calls it in process. Methods are named after the calls and
take and return their messages; failures are classes of the one table. All of it runs on one event loop, which never
waits for the device without awaiting.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from maniple.v1 import worker_pb2
from service_chassis.errors import Fenced, InvalidParameter, LeaseHeld, NotBuilt
from service_chassis.protocol.broadcast_ring import ReaderFds
from service_chassis.protocol.version import (
    FEATURE_FULL_SAMPLING,
    FEATURE_LOGPROBS,
    FEATURE_MASKS,
    FEATURE_POOLING,
    FEATURE_SLEEP,
    FEATURE_SPECULATION,
    MAX_PROTOCOL_VERSION,
    MIN_PROTOCOL_VERSION,
)
from service_chassis.telemetry import get_logger
from worker_service import pickled_calls
from worker_service.config import WorkerConfig
from worker_service.delta_ring import DeltaRing
from worker_service.dormancy import Dormancy
from worker_service.heartbeat import Failure, Vitals, failure_of
from worker_service.metrics import RankMetrics
from worker_service.model_files import read_model_files
from worker_service.ownership import DEFAULT_LEASE_S, Ownership, RefusalKind, Refused
from worker_service.snapshot import snapshot_parts
from worker_service.stages import Stages
from worker_service.step_loop import CompletedStep, StepLoop
from worker_service.steps import Goodbye, Steps
from worker_service.tombstones import Tombstones

T = TypeVar("T")

_TICK_S = 0.25
_DRAIN_S = 0.02  # what is in the socket when a lease seems to have lapsed gets this long to be read


class Rank:
    """One device, one shard, one copy of the batch state.

    Args:
        config: of this rank.
        request_exit: called once, on the event loop, when the owner wants this rank gone; the argument says why.
    """

    def __init__(self, config: WorkerConfig, *, request_exit: Callable[[str], None]) -> None:
        self.config = config
        self.health_address = config.health_listen
        self.vitals = Vitals(incarnation_id=secrets.token_hex(8))
        self.tombstones = Tombstones()
        self._request_exit = request_exit
        self._ownership = Ownership(time.monotonic(), _TICK_S)
        self._delta_ring: DeltaRing | None = None
        self.metrics: RankMetrics | None = None  # where somebody asks for them

    async def start(self) -> None:
        """Start the device thread. Inside the event loop that will call everything else."""
        loop = asyncio.get_running_loop()

        def post(callback: Callable[[], None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback)

        self._step_loop = StepLoop(self.vitals, post, self._on_completed, self._on_step_failed)
        self._steps = Steps(
            self.config,
            self._ownership,
            self.vitals,
            self._step_loop,
            self.tombstones,
            self._fail,
            self._on_goodbye,
        )
        self._stages = Stages(self.config, self.vitals, self._step_loop, self._steps, self._fail, self._check_epoch)
        self._dormancy = Dormancy(self._stages, self._steps, self._step_loop)
        if self.config.delta_ring_fds:
            fds = ReaderFds.parse(self.config.delta_ring_fds)
            self._delta_ring = DeltaRing(fds, self.config.rank, self._steps.take_broadcast, self._fail)
        self._step_loop.start()
        self._ticker = asyncio.create_task(self._tick())

    def measure(self) -> RankMetrics:
        """Measure steps from now on; return what is measured. Once, after ``start``."""
        steps, stages = self._steps, self._stages
        self.metrics = RankMetrics(
            self.config.rank,
            self.vitals,
            memory=lambda: stages.memory,
            asleep=lambda: steps.asleep,
            is_ready=lambda: steps.ready,
        )
        return self.metrics

    def _on_completed(self, done: CompletedStep) -> None:
        if self.metrics is not None:
            self.metrics.step_completed(done)
        self._steps.on_completed(done)

    async def close(self) -> None:
        """End streams and the device thread. Idempotent."""
        self._steps.end_stream(None)
        if self._delta_ring is not None:
            await self._delta_ring.close()
        self._stages.abort_collectives()
        self._step_loop.close()
        for task in (self._ticker, *self._stages.tasks):
            task.cancel()
        await asyncio.gather(self._ticker, *self._stages.tasks, return_exceptions=True)

    def method(self, name: str) -> Callable[[Any], Any]:
        """Return the method that answers a call of the protocol: ``method("LoadModel")``."""
        answer: Callable[[Any], Any] = getattr(self, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        return answer

    async def call(self, name: str, request: Message) -> Message:
        """Make a unary call by its name in the protocol: ``call("LoadModel", request)``."""
        answer: Message = await self.method(name)(request)
        return answer

    # Ownership

    async def describe(self, request: worker_pb2.DescribeRequest) -> worker_pb2.DescribeResponse:
        now = time.monotonic()
        batch = self._steps.batch
        return worker_pb2.DescribeResponse(
            incarnation_id=self.vitals.incarnation_id,
            min_protocol_version=MIN_PROTOCOL_VERSION,
            max_protocol_version=MAX_PROTOCOL_VERSION,
            features=_features(self.config),
            stage=self._stages.stage,
            epoch=self._ownership.epoch,
            owner_address=self._ownership.owner_address,
            owner_silent_for_ms=int(self._ownership.silent_for(now) * 1000),
            formation_id=self.vitals.formation_id,
            accepted=self.vitals.accepted[0],
            completed=self.vitals.completed[0],
            num_rows=batch.state.num_rows if batch else 0,
            num_tombstones=len(self.tombstones),
            health_address=self.health_address,
            pid=os.getpid(),
            device=self._stages.device,
            version=importlib.metadata.version("maniple"),
            limits=self._stages.limits,
            model=self._stages.model,
            step_us_per_token=self._stages.step_us_per_token,
            backend=self._stages.backend,
            rank=self.config.rank,
            world_size=self.config.world_size,
            sleeping_tags=sorted(self._steps.asleep),
            weights_path=self._stages.weights_path,
        )

    async def join(self, request: worker_pb2.JoinRequest) -> worker_pb2.JoinResponse:
        self._check_join(request)
        if not request.force and self._ownership.lapsed(time.monotonic()):
            await asyncio.sleep(_DRAIN_S)
        verdict = self._ownership.ask(
            time.monotonic(),
            epoch=request.epoch,
            owner_id=request.owner_id,
            owner_address=request.owner_address,
            force=request.force,
            lease_s=request.lease_ms / 1000 if request.lease_ms else DEFAULT_LEASE_S,
        )
        if isinstance(verdict, Refused):
            get_logger().warning("grant.refused", epoch=request.epoch, reason=verdict.reason)
            if verdict.kind is RefusalKind.LEASE_HELD:
                raise LeaseHeld(verdict.reason, metadata={"owner_address": self._ownership.owner_address})
            raise Fenced(verdict.reason)
        if self.vitals.epoch != verdict.epoch:
            self._steps.end_stream(Fenced(f"epoch {verdict.epoch} was granted to another tenure"))
            self._stages.lose_owner()
            self._dormancy.lose_owner()
            self.vitals.epoch = verdict.epoch
        get_logger().info("epoch.granted", epoch=verdict.epoch, grounds=verdict.grounds.value)
        accepted, digest = self.vitals.accepted
        return worker_pb2.JoinResponse(
            epoch=verdict.epoch,
            incarnation_id=self.vitals.incarnation_id,
            formation_id=self.vitals.formation_id,
            accepted=accepted,
            completed=self.vitals.completed[0],
            state_digest=digest,
            features=[feature for feature in _features(self.config) if feature in request.features],
            stage=self._stages.stage,
            rendezvous=self._stages.rendezvous(),
        )

    def _check_join(self, request: worker_pb2.JoinRequest) -> None:
        if request.epoch == 0:
            raise InvalidParameter("epoch", 0, "must be at least 1")
        if not request.owner_id:
            raise InvalidParameter("owner_id", "", "must not be empty")
        if request.rank != self.config.rank:
            raise InvalidParameter("rank", request.rank, f"this is rank {self.config.rank}")
        if request.world_size != self.config.world_size:
            rule = f"this rank was started for {self.config.world_size}"
            raise InvalidParameter("world_size", request.world_size, rule)
        if not MIN_PROTOCOL_VERSION <= request.protocol_version <= MAX_PROTOCOL_VERSION:
            rule = f"this rank speaks versions {MIN_PROTOCOL_VERSION} to {MAX_PROTOCOL_VERSION}"
            raise InvalidParameter("protocol_version", request.protocol_version, rule)

    async def leave(self, request: worker_pb2.LeaveRequest) -> worker_pb2.LeaveResponse:
        self._check_epoch(request.epoch)
        self._exit_soon(f"told to leave: {request.reason or 'no reason given'}")
        return worker_pb2.LeaveResponse()

    def _check_epoch(self, epoch: int) -> None:
        refused = self._ownership.refusal(epoch)
        if refused is not None:
            raise Fenced(refused.reason)

    def _on_goodbye(self, kind: Goodbye.Kind.ValueType) -> None:
        if kind == Goodbye.KIND_SHUTDOWN:
            self._exit_soon("the owner said goodbye SHUTDOWN")
            return
        self._ownership.let_go()
        if kind != Goodbye.KIND_HANDOVER:
            self._stages.leave_formation()

    def _exit_soon(self, reason: str) -> None:
        get_logger().info("rank.leaving", reason=reason)
        self._request_exit(reason)  # first: it sets the timer that ends us if aborting hangs
        self._stages.abort_collectives()

    async def _tick(self) -> None:
        """Keep the lease's clock, and leave when orphaned for too long."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._ownership.tick(now)
            silent_s = self._ownership.silent_for(now)
            orphaned = self._ownership.orphaned(now)
            self.tombstones.expire(now, orphaned=orphaned)
            if orphaned and 0 < self.config.orphan_grace_s <= silent_s:
                self._wipe()
                self._exit_soon(f"no owner for {silent_s:.0f} s")
                return

    def _wipe(self) -> None:
        """Overwrite or let go of what users sent. A device that hangs keeps its copy until the process ends."""
        if self._steps.batch is not None:
            self._steps.batch.completed.wipe()
        self._steps.drop()
        self.tombstones.clear()
        self._step_loop.call(self._step_loop.forget_rows)

    # The six stages

    async def form_group(self, request: worker_pb2.FormGroupRequest) -> worker_pb2.FormGroupResponse:
        self._check_epoch(request.epoch)
        return await self._stages.form_group(request)

    async def load_model(self, request: worker_pb2.LoadModelRequest) -> worker_pb2.LoadModelResponse:
        self._check_epoch(request.epoch)
        return await self._stages.load_model(request)

    async def profile_memory(self, request: worker_pb2.ProfileMemoryRequest) -> worker_pb2.ProfileMemoryResponse:
        self._check_epoch(request.epoch)
        return await self._stages.profile_memory(request)

    async def allocate_kv_cache(self, request: worker_pb2.AllocateKvCacheRequest) -> worker_pb2.AllocateKvCacheResponse:
        self._check_epoch(request.epoch)
        return await self._stages.allocate_kv_cache(request)

    async def warm_up(self, request: worker_pb2.WarmUpRequest) -> worker_pb2.WarmUpResponse:
        self._check_epoch(request.epoch)
        return await self._stages.warm_up(request)

    # Steps, and what comes after

    def steps(self, requests: AsyncIterator[worker_pb2.StepsRequest]) -> AsyncIterator[worker_pb2.StepsResponse]:
        """Serve one Steps stream."""
        return self._steps.serve(requests)

    async def fetch_deltas(self, request: worker_pb2.FetchDeltasRequest) -> worker_pb2.FetchDeltasResponse:
        self._check_epoch(request.epoch)
        batch = self._steps.batch
        kept = batch.deltas.after(request.from_step - 1) if batch else []
        return worker_pb2.FetchDeltasResponse(deltas=[raw for _, raw in kept])

    async def snapshot(self, request: worker_pb2.SnapshotRequest) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        """Tell the batch as it is at ``completed``. What happens meanwhile does not show; the device is not asked."""
        self._check_epoch(request.epoch)
        batch, now = self._steps.batch, time.monotonic()
        frozen = batch.completed.freeze(now) if batch else None
        buried = self.tombstones.all(now)
        get_logger().info(
            "snapshot.taken", epoch=request.epoch, step=frozen.step if frozen else 0, num_tombstones=len(buried)
        )
        for part in snapshot_parts(frozen, self._stages.limits, buried, self.tombstones.logprobs()):
            yield part

    def _on_step_failed(self, step: int, error: Exception) -> None:
        if self._steps.batch is None:
            return  # it waited in a collective of a formation that was left, and leaving ended that
        self._fail(failure_of(error, step=step))

    def _fail(self, failure: Failure) -> None:
        """Note that this rank is lost, once, and have everybody told at once."""
        if self.vitals.failure is not None:
            return
        self.vitals.failure = failure
        self._stages.stage = worker_pb2.WORKER_STAGE_FAILED
        self._steps.ready = False
        get_logger().error("rank.failed", kind=failure.kind, reason=failure.message, step=failure.step)
        self._steps.report_now()
        self.vitals.announce()

    def get_model_files(
        self, request: worker_pb2.GetModelFilesRequest
    ) -> AsyncIterator[worker_pb2.GetModelFilesResponse]:
        """Send small files of the loaded model's directory; unknown names are left out."""
        return read_model_files(self._stages.model_source, list(request.names))

    async def call_pickled(self, request: worker_pb2.CallPickledRequest) -> worker_pb2.CallPickledResponse:
        pickled_calls.check_allowed(self.config.allow_insecure_serialization)
        self._check_epoch(request.epoch)  # before anything in the bytes can run
        function = pickled_calls.load_function(request.function)
        result = await self.call_function(lambda rank: pickled_calls.run(function, rank), request.epoch)
        return worker_pb2.CallPickledResponse(result=result)

    async def call_function(self, function: Callable[[Rank], T], epoch: int) -> T:
        """Call a function with this rank, between steps, on the thread that owns the device."""
        self._check_epoch(epoch)
        return await asyncio.wrap_future(self._step_loop.call(lambda: function(self)))

    # Sleep, and other weights

    async def sleep(self, request: worker_pb2.WorkerServiceSleepRequest) -> worker_pb2.WorkerServiceSleepResponse:
        self._check_epoch(request.epoch)
        return await self._dormancy.sleep(request)

    async def wake_up(self, request: worker_pb2.WorkerServiceWakeUpRequest) -> worker_pb2.WorkerServiceWakeUpResponse:
        self._check_epoch(request.epoch)
        return await self._dormancy.wake_up(request)

    async def update_weights(
        self, request: worker_pb2.WorkerServiceUpdateWeightsRequest
    ) -> worker_pb2.WorkerServiceUpdateWeightsResponse:
        self._check_epoch(request.epoch)
        return await self._dormancy.update_weights(request)

    # In the protocol, not built yet

    async def load_lora(
        self, request: worker_pb2.WorkerServiceLoadLoraRequest
    ) -> worker_pb2.WorkerServiceLoadLoraResponse:
        raise NotBuilt("adapters are not built yet")

    async def unload_lora(
        self, request: worker_pb2.WorkerServiceUnloadLoraRequest
    ) -> worker_pb2.WorkerServiceUnloadLoraResponse:
        raise NotBuilt("adapters are not built yet")

    async def put_blob(self, requests: AsyncIterator[worker_pb2.PutBlobRequest]) -> worker_pb2.PutBlobResponse:
        raise NotBuilt("blobs are not built yet: prompts travel in deltas, and have at most 1 MiB")


def _features(config: WorkerConfig) -> list[str]:
    """Return the optional features of this process: without torch only the scripted model's plain sampling is here."""
    sampling = [FEATURE_FULL_SAMPLING] if importlib.util.find_spec("torch") is not None else []
    sleep = [FEATURE_SLEEP] if config.enable_sleep_mode else []
    return [FEATURE_LOGPROBS, FEATURE_MASKS, FEATURE_POOLING, FEATURE_SPECULATION, *sampling, *sleep]
