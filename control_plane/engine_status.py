"""What the engine tells doors about itself, and which ids it remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.group.settings import RankStatus
from control_plane.live_request import LiveRequest
from service_chassis.ids import RequestId

# How long the id of a finished request stays taken (docs/errors.md): a proxy's retry must not run it again.
REMEMBER_ID_S = 60.0
# How many finished requests are kept whole meanwhile: as many as workers keep tombstones.
MAX_RECORDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What a request may ask for."""

    max_model_len: int  # prompt and output, tokens
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int  # the null block included
    max_num_waiting: int
    full_sampling: bool = True  # False: greedy and seeded draws alone (the scripted model without torch)
    pooling: bool = True  # False: the workers are of a release that cannot embed
    masks: bool = True  # False: they are of one that takes no masks
    logprobs: bool = True  # False: they are of one that tells no log-probabilities
    sleep: bool = False  # True: they were started so that they can give their memory back
    dtype: str = ""  # of the weights, as the workers loaded them
    weight_bytes: int = 0  # of all ranks, as they were loaded
    kv_bytes: int = 0  # of all ranks, as they were allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What the engine does now. Rates are per second over the last ten; counts are since the start."""

    model: str
    uptime_s: float
    ready: bool
    not_ready_reason: str
    epoch: int
    step: int
    ranks: tuple[RankStatus, ...]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_waiting_tokens: int  # to be computed before what waits can sample, if nothing of it is cached
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    steps_per_s: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_finished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group as operators see it. Without an engine it is being formed, or lost."""

    name: str
    state: str  # as in admin.proto
    reason: str
    engine: EngineStatus | None
    limits: EngineLimits | None

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks that some row holds. What is cached and can be evicted is free to a request."""
        if self.engine is None or self.limits is None:
            return 0
        return self.limits.num_blocks - 1 - self.engine.num_free_blocks - self.engine.num_cached_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """What all groups of a control plane do now. Sums over the groups, but for ``groups``."""

    groups: tuple[GroupView, ...]
    uptime_s: float
    num_running: int
    num_waiting: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    steps_per_s: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_finished: int


class RequestIds:
    """The requests that finished less than a minute ago: their ids, and what a client that resumes is told of them."""

    def __init__(self) -> None:
        self.num_finished = 0
        self._finished_at: OrderedDict[RequestId, float] = OrderedDict()  # oldest first
        self._records: OrderedDict[RequestId, tuple[float, Callable[[], LiveRequest]]] = OrderedDict()
        self._in_doubt: OrderedDict[RequestId, tuple[float, LiveRequest]] = OrderedDict()

    def add_finished(
        self, request_id: RequestId, now: float, *, is_free: bool, tell: Callable[[], LiveRequest] | None = None
    ) -> None:
        """Note the end of a request; its id stays taken unless ``is_free``. ``tell`` returns it as it ended."""
        self.num_finished += 1
        self._forget_old(now)
        if not is_free:
            self._finished_at[request_id] = now
        if tell is not None:
            self._records[request_id] = (now, tell)
            self._records.move_to_end(request_id)
            if len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)

    def record(self, request_id: RequestId, now: float) -> LiveRequest | None:
        """Return a finished request."""
        self._forget_old(now)
        found = self._records.get(request_id)
        return found[1]() if found is not None else None

    def add_in_doubt(self, live: LiveRequest, now: float) -> None:
        """Note a request whose group was lost while no rank could say whether another owner goes on with it."""
        self._in_doubt[live.generation.request_id] = (now, live)
        self._in_doubt.move_to_end(live.generation.request_id)
        if len(self._in_doubt) > MAX_RECORDS:
            self._in_doubt.popitem(last=False)

    def in_doubt(self, request_id: RequestId, now: float) -> LiveRequest | None:
        """Return such a request. Where it is proven that nobody knows it any more, it was lost with its group."""
        self._forget_old(now)
        found = self._in_doubt.get(request_id)
        return found[1] if found is not None else None

    def is_recent(self, request_id: RequestId, now: float) -> bool:
        """Say whether the id is still taken by a finished request."""
        self._forget_old(now)
        return request_id in self._finished_at

    def free(self, request_id: RequestId) -> None:
        """Make the id usable again."""
        self._finished_at.pop(request_id, None)

    def _forget_old(self, now: float) -> None:
        while self._finished_at and now - next(iter(self._finished_at.values())) >= REMEMBER_ID_S:
            self._finished_at.popitem(last=False)
        for records in (self._records, self._in_doubt):
            while records and now - next(iter(records.values()))[0] >= REMEMBER_ID_S:
                records.popitem(last=False)
