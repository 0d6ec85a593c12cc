"""A client's request and its samples, as the scheduler sees them.

A request asks for ``n`` samples of one prompt. A sample is what occupies a row. The scheduler owns everything that
changes here; others read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from service_chassis.ids import BlockId, ReqIndex, RequestId, RowKey

# What decides who goes first: (priority, arrival, order of add, sample index); smaller goes first.
Order = tuple[int, float, int, int]

NO_ROW = ReqIndex(-1)


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"


class RefusalKind(Enum):
    """Why a request cannot be added now, or ever."""

    DUPLICATE = auto()  # the id lives
    QUEUE_FULL = auto()  # a retry may help
    TOO_LONG = auto()  # the prompt leaves no room for one token of output
    NEEDS_MORE_BLOCKS = auto()  # the prompt does not fit into the whole KV cache


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is not added. ``sentence`` is fit for the client."""

    kind: RefusalKind
    sentence: str


class SampleState(Enum):
    """Where a sample is."""

    WAITING = auto()  # no row yet
    PREFILL = auto()  # has a row and blocks; computes only when mentioned
    DECODE = auto()  # advances by one token a step unless mentioned
    PREEMPTED = auto()  # has a row and its tokens, no blocks
    LEFT = auto()  # its last token is planned and its row given away; results are outstanding
    FINISHED = auto()


class Request:
    """One client generation. Built by the engine, handed to ``Scheduler.add``, mutable state owned by the scheduler."""

    __slots__ = (
        "arrival",
        "cache_namespace",
        "deadline",
        "masked",
        "max_tokens",
        "min_tokens",
        "n",
        "num_cached_tokens",
        "num_live",
        "order",
        "outputs",
        "paused",
        "payload",
        "payload_bytes",
        "pools",
        "priority",
        "prompt_done",
        "prompt_token_ids",
        "request_id",
        "result_entries",
        "samples",
        "skip_reading_prefix_cache",
        "started",
        "stop_ids",
    )

    def __init__(
        self,
        *,
        request_id: RequestId,
        prompt_token_ids: tuple[int, ...],
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        n: int = 1,
        priority: int = 0,
        arrival: float,
        deadline: float | None = None,
        cache_namespace: bytes = b"",
        skip_reading_prefix_cache: bool = False,
        payload: object = None,
        payload_bytes: int = 0,
        pools: bool = False,
        result_entries: int = 0,
        masked: bool = False,
        outputs: tuple[tuple[int, ...] | None, ...] = (),
    ) -> None:
        """Describe a request whose values a door has checked.

        Args:
            request_id: unique among the living.
            prompt_token_ids: at least one.
            max_tokens: output tokens of each sample at most; at least 1.
            min_tokens: ``stop_ids`` are no stops among so many first output tokens.
            stop_ids: end-of-text and stop ids; sampling one ends the sample.
            n: samples, at least 1.
            priority: lower goes first.
            arrival: on the clock of ``deadline``; orders requests of one priority.
            deadline: when nobody waits any more; None: never.
            cache_namespace: only equal namespaces share blocks.
            skip_reading_prefix_cache: compute every token of the prompt (prompt log-probabilities).
            payload: opaque; whoever encodes the plan finds it at ``NewRow.sample.request.payload``.
            payload_bytes: what it adds to the delta of each row.
            pools: it ends with a vector, once its prompt is computed, and samples nothing; it has one sample.
            masked: what it may sample is said anew for each token, when the step is on its way.
            result_entries: what each token of a prefill adds to the result of its step (prompt log-probabilities).
            outputs: of a request that goes on from elsewhere, for each sample its output so far, or None if it ended.
                Empty: a request that begins.
        """
        assert prompt_token_ids, "a prompt has at least one token"
        assert min(max_tokens, n) >= 1
        assert not pools or n == 1
        assert not outputs or (len(outputs) == n and any(output is not None for output in outputs))
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_ids = stop_ids
        self.n = n
        self.priority = priority
        self.arrival = arrival
        self.deadline = deadline
        self.cache_namespace = cache_namespace
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.payload = payload
        self.payload_bytes = payload_bytes
        self.pools = pools
        self.result_entries = result_entries
        self.masked = masked
        self.outputs = outputs
        self.order: Order = (priority, arrival, 0, 0)  # made unique by Scheduler.add
        self.samples: tuple[Sample, ...] = ()  # made by Scheduler.add
        self.num_live = 0  # samples that did not end
        self.num_cached_tokens = 0  # prompt tokens that the first sample found in the prefix cache
        self.started = False  # some sample was in a delta
        self.prompt_done = False  # the first sample got through the prompt, or ended: the others need not wait for it
        self.paused = False

    @property
    def finished(self) -> bool:
        """All samples ended."""
        return self.num_live == 0

    def num_known_tokens(self) -> int:
        """Tokens of the longest sample, before the request is added."""
        return len(self.prompt_token_ids) + len(self._longest_output())

    def longest_known(self) -> tuple[int, ...]:
        """Return the tokens of the longest sample, before the request is added."""
        return self.prompt_token_ids + self._longest_output()

    def _longest_output(self) -> tuple[int, ...]:
        return max((output or () for output in self.outputs), key=len, default=())

    def continued(self) -> Request:
        """Return what is left of this living request, for another scheduler: its order, its rules, its output so far.

        One that was in no delta begins there like any other.
        """
        num_prompt_tokens = len(self.prompt_token_ids)
        outputs = tuple(
            None if sample.state is SampleState.FINISHED else tuple(sample.token_ids[num_prompt_tokens:])
            for sample in self.samples
        )
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_ids=self.stop_ids,
            n=self.n,
            priority=self.priority,
            arrival=self.arrival,
            deadline=self.deadline,
            cache_namespace=self.cache_namespace,
            skip_reading_prefix_cache=self.skip_reading_prefix_cache,
            payload=self.payload,
            payload_bytes=self.payload_bytes,
            pools=self.pools,
            result_entries=self.result_entries,
            masked=self.masked,
            outputs=outputs if self.started or self.outputs else (),
        )

    def __repr__(self) -> str:
        return f"Request({self.request_id!r})"


class Sample:
    """One of the ``n`` continuations of a request."""

    __slots__ = (
        "block_ids",
        "decode_since",
        "due_tick",
        "hashes",
        "index",
        "limit",
        "num_prefill_tokens",
        "num_registered",
        "offset",
        "order",
        "req_index",
        "request",
        "resident_since",
        "row_key",
        "state",
        "stop_floor",
        "stop_ids",
        "token_ids",
        "tries_from",
        "tries_in_vain",
        "unsettled",
    )

    def __init__(self, request: Request, index: int, limit: int) -> None:
        """Make a waiting sample that ends, at the latest, with ``limit`` known tokens; one that ended stays so."""
        output = request.outputs[index] if request.outputs else ()
        self.request = request
        self.index = index
        self.order: Order = (*request.order[:3], index)
        self.state = SampleState.WAITING if output is not None else SampleState.FINISHED
        # Known here; a decode row has more on the workers.
        self.token_ids = [*request.prompt_token_ids, *(output or ())]
        self.limit = limit
        self.stop_ids = request.stop_ids
        self.stop_floor = len(request.prompt_token_ids) + request.min_tokens  # position from which on a stop id stops
        self.req_index = NO_ROW
        self.row_key = RowKey(0)
        self.block_ids: list[BlockId] = []
        self.num_prefill_tokens = len(self.token_ids)
        # Computed tokens, those of planned steps included: `offset` itself, or `offset + tick` in DECODE (see Batch).
        self.offset = 0
        self.due_tick = -1  # DECODE: the tick under which Batch has filed it
        self.hashes: list[bytes] = []  # chain hashes of its full blocks of known tokens, as far as they were needed
        self.num_registered = 0  # leading blocks of `block_ids` that the pool was told the hashes of
        self.resident_since = 0  # step that gave it the present blocks
        self.decode_since = 0  # step with which it turned DECODE
        # Tokens tried ahead that workers count as computed, and were not accepted or not answered (see Speculation).
        self.unsettled = 0
        self.tries_in_vain = 0  # in a row
        self.tries_from = 0  # tick

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known here."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def __repr__(self) -> str:
        return f"Sample({self.request.request_id!r}, {self.index}, {self.state.name}, row={self.req_index})"
