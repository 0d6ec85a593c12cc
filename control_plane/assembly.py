"""Build the parts of a control plane from its configuration: groups not yet formed, engines for formed ones."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from control_plane.config import ControlPlaneConfig
from control_plane.delta_recorder import DeltaRecorder, GroupRecording
from control_plane.engine import Engine
from control_plane.engine_status import EngineLimits, RequestIds
from control_plane.executors.base import Executor
from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.executors.ray import RayExecutor
from control_plane.executors.remote import RemoteExecutor
from control_plane.executors.selection import MP, RAY, REMOTE, UNI
from control_plane.executors.uniproc import UniprocExecutor
from control_plane.executors.worker_settings import WorkerSettings
from control_plane.group.batch_snapshot import BatchSnapshot
from control_plane.group.recorded_group import RecordedGroup
from control_plane.group.settings import GroupFacts, GroupSettings
from control_plane.group.worker_group import WorkerGroup
from control_plane.metered_engine import MeteredEngine
from control_plane.metrics.meters import GroupMeters
from control_plane.request_spans import RequestSpans
from control_plane.scheduling.scheduler import Scheduler, SchedulerLimits
from control_plane.spanned_engine import SpannedEngine
from control_plane.step_trace import GroupTrace
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.text.tokenizer import Tokenizer
from control_plane.traced_engine import TracedEngine
from service_chassis.protocol.version import (
    FEATURE_FULL_SAMPLING,
    FEATURE_LOGPROBS,
    FEATURE_MASKS,
    FEATURE_POOLING,
    FEATURE_SLEEP,
)
from service_chassis.scripted import parse_scripted
from service_chassis.tls import ClientTls

# Of the vectors in one step's result: the ranks keep the results of some dozen steps.
MAX_VECTOR_BYTES = 1 << 20


def build_group(
    config: ControlPlaneConfig,
    model_path: str,
    owner_address: str,
    *,
    group: int = 0,
    recorder: DeltaRecorder | None = None,
    worker_tls: ClientTls | None = None,
    trace: GroupTrace | None = None,
) -> WorkerGroup:
    """Return one of the groups that the configuration asks for, not yet formed.

    ``recorder`` is told of its steps, and ``trace`` when they were where on its ranks.
    """
    executor = build_executor(config, group=group, worker_tls=worker_tls)
    settings = _group_settings(config, model_path, owner_address)
    owner_id = secrets.token_hex(8)
    made = (
        WorkerGroup(executor, settings, owner_id=owner_id)
        if recorder is None
        else RecordedGroup(executor, settings, owner_id=owner_id, recording=GroupRecording(recorder, str(group)))
    )
    made.on_timing = trace.rank_timed if trace is not None else None
    return made


def build_executor(config: ControlPlaneConfig, *, group: int = 0, worker_tls: ClientTls | None = None) -> Executor:
    """Return what starts or finds the ranks of one group; ``group`` counts the groups of worker addresses."""
    local = config.executor in (UNI, MP)
    # Ranks in Ray listen on a network, and a takeover brings no more over it than the steps before did.
    in_plaintext = config.executor == RAY and config.allow_plaintext_workers
    settings = WorkerSettings(
        device=config.device,
        first_device=group * config.tensor_parallel_size if local else 0,
        device_ids=config.device_ids[group * config.tensor_parallel_size :][: config.tensor_parallel_size],
        num_threads=config.num_threads,
        attention_backend=config.attention_backend,
        torch_compile=config.torch_compile,
        tune_kernels=config.tune_kernels,
        enable_sleep_mode=config.enable_sleep_mode,
        sleep_backend=config.sleep_backend,
        sleep_directory=config.sleep_directory,
        num_groups_sharing=config.num_groups if local else 1,
        report_interval_s=config.report_interval_s,
        idle_report_interval_s=config.idle_report_interval_s,
        allow_insecure_serialization=config.allow_insecure_serialization,
        allow_plaintext_listen=in_plaintext,
        allow_plaintext_snapshot=in_plaintext,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    world_size = config.tensor_parallel_size
    if config.executor == UNI:
        return UniprocExecutor(settings)
    if config.executor == REMOTE:
        return RemoteExecutor(config.worker_addresses[group], world_size=world_size, settings=settings, tls=worker_tls)
    if config.executor == RAY:
        # Under this name the next control plane of the same model finds the ranks.
        name = f"{config.served_model_name[0]}/group{group}"
        return RayExecutor(
            name=name, world_size=world_size, settings=settings, address=config.ray_address, tls=worker_tls
        )
    return MultiprocExecutor(world_size=world_size, settings=settings, broadcast_ring=config.broadcast_ring)


def build_engine(
    config: ControlPlaneConfig,
    group: WorkerGroup,
    facts: GroupFacts,
    tokenizer: Tokenizer,
    ids: RequestIds | None = None,
    *,
    adopted: BatchSnapshot | None = None,
    survivors: BatchSnapshot | None = None,
    grammars: GrammarCompiler | None = None,
    trace: GroupTrace | None = None,
    meters: GroupMeters | None = None,
    spans: RequestSpans | None = None,
) -> Engine:
    """Return an engine for a group that lives; what watches it, and what else may be None, is as there."""
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            max_steps_in_flight=facts.max_steps_in_flight,
            num_speculative_tokens=facts.num_speculative_tokens,
            max_num_waiting=config.max_num_waiting,
            max_vectors=max(1, MAX_VECTOR_BYTES // (4 * max(facts.model.hidden_size, 1))),
        ),
        enable_prefix_caching=config.enable_prefix_caching,
        first_step=facts.first_step,
    )
    scripted = parse_scripted(config.model)
    limits = EngineLimits(
        max_model_len=facts.max_model_len,
        vocab_size=facts.model.vocab_size,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        max_num_waiting=config.max_num_waiting,
        full_sampling=FEATURE_FULL_SAMPLING in facts.features and (scripted is None or scripted.sampler != "numpy"),
        pooling=FEATURE_POOLING in facts.features,
        logprobs=FEATURE_LOGPROBS in facts.features,
        masks=FEATURE_MASKS in facts.features,
        sleep=FEATURE_SLEEP in facts.features,
        dtype=facts.model.dtype,
        weight_bytes=facts.model.weight_bytes,
        kv_bytes=facts.kv_bytes,
    )
    if meters is not None:
        meters.came_to_life(facts, with_batch=adopted is not None)
    make = observed_engine(trace=trace, meters=meters, spans=spans)
    return make(
        scheduler=scheduler,
        group=group,
        tokenizer=tokenizer,
        limits=limits,
        model=config.served_model_name[0],
        ids=ids,
        adopted=adopted,
        survivors=survivors,
        grammars=grammars,
        resume_grace_s=config.resume_grace_s,
        outlived_by_workers=group.executor.outlives_owner,
    )


def observed_engine(
    *, trace: GroupTrace | None, meters: GroupMeters | None, spans: RequestSpans | None
) -> Callable[..., Engine]:
    """Return what makes an engine that is watched in the ways that are not None: a class that adds up theirs."""
    ways = ((TracedEngine, "trace", trace), (MeteredEngine, "meters", meters), (SpannedEngine, "spans", spans))
    wanted = {way: (name, watcher) for way, name, watcher in ways if watcher is not None}
    if not wanted:
        return Engine
    made: Any = type("ObservedEngine", (*wanted, Engine), {})
    return partial(made, **dict(wanted.values()))


def _group_settings(config: ControlPlaneConfig, model_path: str, owner_address: str) -> GroupSettings:
    return GroupSettings(
        model=model_path,
        owner_address=owner_address,
        dtype=config.dtype,
        quantization=config.quantization,
        model_impl=config.model_impl,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_steps_in_flight=config.max_steps_in_flight,
        num_speculative_tokens=config.num_speculative_tokens,
        prompt_lookup_min=config.prompt_lookup_min,
        prompt_lookup_max=config.prompt_lookup_max,
        batch_invariant=config.batch_invariant,
        enforce_eager=config.enforce_eager,
        cuda_graph_sizes=config.cuda_graph_sizes,
        report_interval_s=config.report_interval_s,
        idle_report_interval_s=config.idle_report_interval_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        lease_s=config.lease_s,
        step_timeout_s=config.step_timeout_s,
        startup_timeout_s=config.startup_timeout_s,
    )
