"""Write how busy a group is in the words of ``vllm.grpc.engine`` and ``smg.grpc.common``."""

from __future__ import annotations

from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from control_plane.engine_status import EngineLimits, EngineStatus


def scheduler_load(dp_rank: int, status: EngineStatus, limits: EngineLimits) -> vllm_engine_pb2.SchedulerLoad:
    """Return the load of a group as it is polled."""
    num_blocks = limits.num_blocks - 1
    # Cached blocks that can be evicted are free to a request.
    num_used = num_blocks - status.num_free_blocks - status.num_cached_blocks
    queries = status.prefix_cache_queries
    return vllm_engine_pb2.SchedulerLoad(
        dp_rank=dp_rank,
        num_running_reqs=status.num_running,
        num_waiting_reqs=status.num_waiting,
        num_total_reqs=status.num_running + status.num_waiting,
        num_used_tokens=num_used * limits.block_size,
        max_total_num_tokens=num_blocks * limits.block_size,
        token_usage=num_used / num_blocks,
        gen_throughput=status.output_tokens_per_s,
        cache_hit_rate=status.prefix_cache_hits / queries if queries else 0.0,
        utilization=min(1.0, status.num_running / limits.max_num_seqs),
        max_running_requests=limits.max_num_seqs,
        num_waiting_uncached_tokens=status.num_waiting_tokens,
    )


def engine_load(load: vllm_engine_pb2.SchedulerLoad, *, sample: int, load_only: bool) -> common_pb2.EngineLoad:
    """Return the same numbers as they are pushed on the stream of cache events."""
    return common_pb2.EngineLoad(
        running_requests=load.num_running_reqs,
        waiting_requests=load.num_waiting_reqs,
        waiting_uncached_tokens=load.num_waiting_uncached_tokens,
        token_usage=load.token_usage,
        active_token_usage=load.token_usage,  # what no row holds is counted in neither
        gen_throughput=load.gen_throughput,
        max_running_requests=load.max_running_requests,
        sample=sample,
        load_only=load_only,
        cache_hit_rate=load.cache_hit_rate,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=load.max_total_num_tokens,
    )
