"""Make a group out of ranks: six stages, each a typed call on all ranks, under one grant (docs/protocol.md)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError
from control_plane.group.claim import Grant, HeldByOther, claim
from control_plane.group.kv_sizing import KvMemory, KvPlan, plan_kv_cache
from control_plane.group.loss import GroupNotFormed, LossKind, LossReason
from control_plane.group.settings import GroupFacts, GroupSettings, ModelOnRanks
from control_plane.group.watchdog import CAUSE_S
from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter
from service_chassis.ids import Epoch, Rank, Step
from service_chassis.protocol.failure_kinds import BROKEN_COLLECTIVE
from service_chassis.protocol.version import FEATURE_SPECULATION
from service_chassis.telemetry import get_logger

log = get_logger()

M = TypeVar("M", bound=Message)
# (stage, rank, share done in [0, 1], what for people)
ProgressCallback = Callable[[str, Rank, float, str], None]


class Formation:
    """One attempt to form a group, within one deadline."""

    def __init__(
        self,
        executor: Executor,
        settings: GroupSettings,
        *,
        owner_id: str,
        progress: ProgressCallback,
        on_granted: Callable[[Grant], None],
    ) -> None:
        """Take what is needed; ``on_granted`` opens the streams, whose heartbeats hold the lease from then on."""
        self._executor = executor
        self._settings = settings
        self._owner_id = owner_id
        self._progress = progress
        self._on_granted = on_granted
        self._started_at = time.monotonic()
        self.stage = ""

    async def run(self, grant: Grant | None = None) -> GroupFacts:
        """Form the group.

        Args:
            grant: of ranks that were started and joined already; without, that is done first.

        Raises:
            ManipleError: a rank refused with a status of the table, e.g. InvalidParameter for a bad model.
            GroupNotFormed: a rank is missing, failed or did not answer in time, or has another owner.
        """
        try:
            return await self._run(grant or await self._start_and_join())
        except HeldByOther as error:
            raise GroupNotFormed(
                LossReason(None, f"another owner holds the group: {error}", LossKind.FENCED)
            ) from error
        except RankCallError as error:
            if isinstance(error.error, InvalidParameter):  # what was asked for is wrong, no rank is
                raise error.error from error
            if BROKEN_COLLECTIVE in error.cause:  # another rank's doing; what became of that one will end this wait
                await asyncio.sleep(CAUSE_S)
            address, _ = self._executor.describe_rank(error.rank)
            where = f" ({address})" if address and address not in str(error) else ""
            reason = f"rank {error.rank}{where} failed at {self.stage}: {error.method}: {error.cause}"
            raise GroupNotFormed(LossReason(error.rank, reason)) from error

    async def _start_and_join(self) -> Grant:
        self._enter("start")
        await self._executor.start(timeout_s=self._left_s())
        self._enter("join")
        return await claim(self._executor, self._settings, owner_id=self._owner_id, left_s=self._left_s)

    async def _run(self, grant: Grant) -> GroupFacts:
        settings = self._settings
        self._on_granted(grant)
        epoch = grant.epoch

        self._enter("form")
        formation_id = secrets.token_hex(8)
        world_size = self._executor.world_size
        first = self._executor.ranks[0]
        rendezvous = self._reachable(first, grant.joined[first].rendezvous)

        def form_request(rank: Rank) -> worker_pb2.FormGroupRequest:
            return worker_pb2.FormGroupRequest(
                epoch=epoch,
                formation_id=formation_id,
                rank=rank,
                world_size=world_size,
                rendezvous=rendezvous,
                tensor_parallel_size=world_size,
                timeout_ms=int(self._left_s() * 1000),
            )

        formed = await self._on_all("FormGroup", form_request, worker_pb2.FormGroupResponse)
        self._enter("load")
        loaded = await self._on_all("LoadModel", self._load_request(epoch), worker_pb2.LoadModelResponse)
        self._enter("profile")
        profile_request = worker_pb2.ProfileMemoryRequest(
            epoch=epoch, gpu_memory_utilization=settings.gpu_memory_utilization
        )
        profiled = await self._on_all("ProfileMemory", profile_request, worker_pb2.ProfileMemoryResponse)
        self._enter("allocate")
        model = loaded[0].model
        max_model_len = settings.max_model_len or model.max_position
        plan = self._size_kv_cache(loaded, profiled, max_model_len)
        limits = self._limits(max_model_len, plan.num_blocks, grant.features)
        allocate_request = worker_pb2.AllocateKvCacheRequest(epoch=epoch, limits=limits)
        allocated = await self._on_all("AllocateKvCache", allocate_request, worker_pb2.AllocateKvCacheResponse)
        self._enter("warm up")
        warm_up_request = worker_pb2.WarmUpRequest(
            epoch=epoch,
            capture_sizes=sorted(settings.cuda_graph_sizes, reverse=True),
            enforce_eager=settings.enforce_eager,
        )
        await self._on_all("WarmUp", warm_up_request, worker_pb2.WarmUpResponse)
        self._enter("ready")

        facts = GroupFacts(
            epoch=epoch,
            formation_id=formation_id,
            features=grant.features,
            first_step=Step(1),
            device=formed[0].device,
            backend=formed[0].backend,
            model=ModelOnRanks(
                source=model.source,
                architecture=model.architecture,
                vocab_size=model.vocab_size,
                max_position=model.max_position,
                dtype=model.dtype,
                weight_bytes=sum(reply.model.weight_bytes for reply in loaded),
                num_kv_groups=model.num_kv_groups,
                hidden_size=model.hidden_size,
            ),
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
            num_blocks=plan.num_blocks,
            max_steps_in_flight=settings.max_steps_in_flight,
            num_speculative_tokens=limits.num_speculative_tokens,
            prompt_lookup_min=limits.prompt_lookup_min,
            prompt_lookup_max=limits.prompt_lookup_max,
            kv_bytes=sum(reply.kv_bytes for reply in allocated),
            step_us_per_token=max(reply.step_us_per_token for reply in profiled),
            formed_in_s=time.monotonic() - self._started_at,
        )
        log.info(
            "group.formed",
            epoch=epoch,
            formation_id=formation_id,
            world_size=world_size,
            device=facts.device,
            model=model.source,
            num_blocks=facts.num_blocks,
            duration_s=round(facts.formed_in_s, 3),
        )
        return facts

    def _reachable(self, rank: Rank, address: str) -> str:
        """Return ``address`` with its host: where it names only a port, that is where we reach the rank itself."""
        if not address.startswith(":"):
            return address
        ours, _ = self._executor.describe_rank(rank)
        host = "127.0.0.1" if ours.startswith("unix:") else ours.rpartition(":")[0].rpartition("/")[2]
        return host + address

    def _load_request(self, epoch: Epoch) -> worker_pb2.LoadModelRequest:
        settings = self._settings
        return worker_pb2.LoadModelRequest(
            epoch=epoch,
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            batch_invariant=settings.batch_invariant,
            quantization=settings.quantization,
            model_impl=settings.model_impl,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
        )

    def _limits(self, max_model_len: int, num_blocks: int, features: frozenset[str]) -> worker_pb2.GroupLimits:
        settings = self._settings
        speculates = settings.num_speculative_tokens and FEATURE_SPECULATION in features
        if settings.num_speculative_tokens and not speculates:
            log.warning("speculation.refused", reason="a rank is of a release that tries no tokens ahead")
        return worker_pb2.GroupLimits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            max_steps_in_flight=settings.max_steps_in_flight,
            num_speculative_tokens=settings.num_speculative_tokens if speculates else 0,
            prompt_lookup_min=settings.prompt_lookup_min if speculates else 0,
            prompt_lookup_max=settings.prompt_lookup_max if speculates else 0,
        )

    def _size_kv_cache(
        self,
        loaded: Sequence[worker_pb2.LoadModelResponse],
        profiled: Sequence[worker_pb2.ProfileMemoryResponse],
        max_model_len: int,
    ) -> KvPlan:
        settings = self._settings
        plan = plan_kv_cache(
            [
                KvMemory(
                    kv_bytes=memory.kv_bytes,
                    block_bytes=load.model.block_bytes,
                    free_bytes=memory.free_bytes if memory.HasField("free_bytes") else None,
                )
                for load, memory in zip(loaded, profiled, strict=True)
            ],
            block_size=settings.block_size,
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            num_kv_blocks=settings.num_kv_blocks,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        )
        if plan.shortage:
            for field in ("kv_cache_memory_bytes", "num_kv_blocks"):
                if asked_for := getattr(settings, field):  # that is wrong, no rank is
                    raise InvalidParameter(field, asked_for, plan.shortage)
            raise GroupNotFormed(LossReason(None, plan.shortage))
        log.info(
            "kv.sized",
            bytes_per_rank=plan.bytes_per_rank,
            num_blocks=plan.num_blocks,
            num_tokens=plan.num_tokens,
            max_concurrency=round(plan.max_concurrency, 2),
            limited_by=plan.limited_by,
        )
        return plan

    async def _on_all(self, method: str, request: Message | Callable[[Rank], Message], reply_type: type[M]) -> list[M]:
        replies = await self._executor.collective_rpc(method, request, timeout_s=self._left_s())
        assert all(isinstance(reply, reply_type) for reply in replies)
        return cast("list[M]", replies)

    def _enter(self, stage: str) -> None:
        self.stage = stage
        for rank in self._executor.ranks:
            self._progress(stage, rank, 0.0, "")

    def _left_s(self) -> float:
        """Return what is left until the start-up deadline; a call still gets a moment to fail with its rank's name."""
        return max(self._settings.startup_timeout_s - (time.monotonic() - self._started_at), 0.05)
