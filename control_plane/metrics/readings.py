"""Read what a control plane is doing, for one scrape. Event loop."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.engine_status import EngineLimits, EngineStatus, GroupView
from control_plane.fleet import Fleet
from control_plane.metrics.meters import Meters
from control_plane.metrics.table import STATES, TAGS
from control_plane.relay import Relay
from maniple.v1 import errors_pb2
from service_chassis.errors import reason_name
from service_chassis.metrics import Reading

# An alert asks for it before the first one.
QUEUE_FULL = reason_name(errors_pb2.ERROR_REASON_QUEUE_FULL)


class ReadFleet:
    """Returns all readings of a moment when called."""

    def __init__(self, fleet: Fleet, relay: Relay, meters: Meters, *, model_name: str, version: str) -> None:
        self._fleet = fleet
        self._relay = relay
        self._meters = meters
        self._model_name = model_name
        self._version = version

    def __call__(self) -> list[Reading]:
        """Return them."""
        readings = [*self._meters.board.readings(), *self._process()]
        for view in self._fleet.status().groups:
            readings += _group(view, (self._model_name, view.name))
        return readings

    def _process(self) -> Iterator[Reading]:
        fleet = self._fleet
        yield Reading("maniple_build_info", (self._version, self._model_name), 1)
        yield Reading("maniple_ready", (), fleet.ready)
        yield Reading("maniple_serving", (), fleet.is_serving)
        yield Reading("maniple_draining", (), fleet.closed.is_set())
        asleep = fleet.rest.tags
        for tag in TAGS:
            yield Reading("maniple_asleep", (tag,), tag in asleep)
        for method, number in self._relay.num_relayed.items():
            yield Reading("maniple_relayed_calls_total", (method,), number)
        for error, number in {QUEUE_FULL: 0, **fleet.num_refused}.items():
            yield Reading("maniple_refused_requests_total", (error,), number)


def _group(view: GroupView, labels: tuple[str, str]) -> Iterator[Reading]:
    for state in STATES:
        yield Reading("maniple_group_state", (*labels, state), state == view.state)
    if view.engine is not None and view.limits is not None:
        yield from _engine(view, view.engine, view.limits, labels)


def _engine(view: GroupView, status: EngineStatus, limits: EngineLimits, labels: tuple[str, str]) -> Iterator[Reading]:
    num_blocks, num_used = limits.num_blocks - 1, view.num_blocks_in_use
    values = {
        "vllm:num_requests_running": status.num_running,
        "vllm:num_requests_waiting": status.num_waiting,
        "vllm:kv_cache_usage_perc": num_used / num_blocks if num_blocks else 0.0,
        "vllm:prefix_cache_queries_total": status.prefix_cache_queries,
        "vllm:prefix_cache_hits_total": status.prefix_cache_hits,
        "vllm:num_preemptions_total": status.num_preemptions,
        "maniple_group_epoch": status.epoch,
        "maniple_group_step": status.step,
        "maniple_group_ranks": len(status.ranks),
        "maniple_waiting_tokens": status.num_waiting_tokens,
        "maniple_weight_bytes": limits.weight_bytes,
        "maniple_kv_cache_bytes": limits.kv_bytes,
    }
    for name, value in values.items():
        yield Reading(name, labels, value)
    uses = {"used": num_used, "cached": status.num_cached_blocks, "free": status.num_free_blocks}
    for use, value in uses.items():
        yield Reading("maniple_kv_blocks", (*labels, use), value)
    for rank in status.ranks:
        of_rank = (*labels, str(rank.rank))
        yield Reading("maniple_rank_connected", of_rank, rank.connected)
        yield Reading("maniple_rank_silent_seconds", of_rank, rank.silent_for_s)
        yield Reading("maniple_rank_completed_step", of_rank, rank.completed)
