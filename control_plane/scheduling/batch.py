"""Keep the rows of the batch without touching those that do nothing new.

House rule: what a step costs here depends on what changes in it, never on how many rows decode. So a decode row's count
of computed tokens is not kept but follows from the number of RUN steps planned, the *tick*: ``offset + tick``; and the
next tick at which something is due for it (a block boundary, its length limit) is known in advance and filed under
that tick. Filed entries are not withdrawn: one that does not fit its sample any more is ignored.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from control_plane.scheduling.order_queue import OrderQueue
from control_plane.scheduling.request import NO_ROW, Order, Sample, SampleState
from service_chassis.ids import ReqIndex, RowKey


def order_of(sample: Sample) -> Order:
    """Sort key: who goes first."""
    return sample.order


def _youngest_of_lowest(order: Order) -> tuple[float, ...]:
    return tuple(-part for part in order)


class Sampling(NamedTuple):
    """Who samples in a step, ascending by row; two pairs of tuples that run in parallel."""

    rows: tuple[ReqIndex, ...]
    samples: tuple[Sample, ...]
    masked_rows: tuple[ReqIndex, ...]  # of these, those that sample under a mask
    masked: tuple[Sample, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Sampling:
        masked = tuple(sample for sample in samples if sample.request.masked)
        rows = tuple(sample.req_index for sample in samples)
        return cls(rows, tuple(samples), tuple(sample.req_index for sample in masked), masked)


NOBODY = Sampling((), (), (), ())


class Batch:
    """Who sits in which row, and in which state. Blocks and queues are others' business."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self.tick = 0  # RUN steps planned
        self._free_rows = list(range(max_num_seqs))  # a heap, so that rows stay dense
        self._prefilling: dict[Sample, None] = {}
        self._victims: OrderQueue[Sample] = OrderQueue()  # samples with blocks, first to be preempted first
        self._due: defaultdict[int, list[Sample]] = defaultdict(list)  # tick -> decode samples
        self._paused: dict[Sample, None] = {}  # decode samples that are held
        # The decode rows, ascending, and who sits in them. The tuples are handed out and made anew only after a change.
        self._decode_rows: list[ReqIndex] = []
        self._decode_samples: list[Sample] = []
        self._shared: Sampling | None = None

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_resident(self) -> int:
        """Samples with blocks."""
        return len(self._victims)

    @property
    def num_advancing(self) -> int:
        """Decode samples that compute a token in the next step."""
        return len(self._decode_rows) - len(self._paused)

    def num_computed_tokens(self, sample: Sample) -> int:
        """Tokens of ``sample`` in the cache once all planned steps are done."""
        return sample.offset + self.tick if sample.state is SampleState.DECODE else sample.offset

    def prefilling(self) -> list[Sample]:
        """Samples half way through their prefill, first in order first. A few: a step leaves one behind at most."""
        return sorted(self._prefilling, key=order_of) if len(self._prefilling) > 1 else list(self._prefilling)

    def victim(self) -> Sample | None:
        """The sample to preempt next: the youngest of the lowest priority."""
        return self._victims.first()

    def seat(self, sample: Sample, row_key: int) -> None:
        """Give a waiting sample the lowest free row."""
        sample.req_index = ReqIndex(heapq.heappop(self._free_rows))
        sample.row_key = RowKey(row_key)

    def begin_prefill(self, sample: Sample, num_computed_tokens: int) -> None:
        """A seated sample has got blocks and starts to compute."""
        sample.state = SampleState.PREFILL
        sample.offset = num_computed_tokens
        self._prefilling[sample] = None
        self._victims.push(_youngest_of_lowest(sample.order), sample)

    def reserve(self, rows: Collection[ReqIndex]) -> None:
        """Take rows that are occupied before anybody was seated."""
        self._free_rows = [row for row in self._free_rows if row not in rows]  # still ascending, and so a heap

    def begin_decode(self, sample: Sample, *, in_this_step: bool = True) -> None:
        """Its prefill is planned to the end by the step of this tick; from the next on it advances by itself.

        Unless ``in_this_step``: it was planned before, and the step of this tick is the first that it advances in.
        """
        del self._prefilling[sample]
        sample.state = SampleState.DECODE
        sample.offset -= self.tick + in_this_step
        place = bisect_left(self._decode_rows, sample.req_index)
        self._decode_rows.insert(place, sample.req_index)
        self._decode_samples.insert(place, sample)
        self._shared = None
        self.file(sample)

    def take_out(self, sample: Sample) -> int:
        """A sample loses its blocks. Return its computed tokens, as workers count them; it keeps its row."""
        num_computed_tokens = self.num_computed_tokens(sample) + sample.unsettled
        sample.unsettled = 0
        if sample.state is SampleState.DECODE:
            place = bisect_left(self._decode_rows, sample.req_index)
            del self._decode_rows[place], self._decode_samples[place]
            self._shared = None
            self._paused.pop(sample, None)
        else:
            del self._prefilling[sample]
        self._victims.discard(sample)
        sample.offset = 0
        return num_computed_tokens

    def unseat(self, sample: Sample) -> ReqIndex:
        """Take a sample's row away; another may have it at once."""
        req_index = sample.req_index
        heapq.heappush(self._free_rows, req_index)
        sample.req_index = NO_ROW
        return req_index

    def file(self, sample: Sample) -> None:
        """File a decode sample under the tick at which it needs a block or reaches its limit."""
        due_at = min(len(sample.block_ids) * self._block_size, sample.limit - 1)  # in computed tokens
        sample.due_tick = due_at - sample.offset
        self._due[sample.due_tick].append(sample)

    def due(self) -> Iterator[Sample]:
        """Yield the samples for which something is due before the step of this tick, and forget that it is.

        A sample may lose its row or blocks while others are dealt with; it is not yielded then.
        """
        for sample in self._due.pop(self.tick, ()):
            filed_here = sample.state is SampleState.DECODE and sample.due_tick == self.tick
            if filed_here and sample not in self._paused:
                sample.due_tick = -1  # it may be filed twice here, if it was paused in between
                yield sample

    def set_paused(self, sample: Sample, paused: bool) -> None:
        """Hold a decode sample, or let it go on. Nothing is due for one that is held, so it is filed anew."""
        if paused:
            self._paused[sample] = None
        elif sample in self._paused:
            del self._paused[sample]
            self.file(sample)

    def is_paused(self, sample: Sample) -> bool:
        """Whether a decode sample is held."""
        return sample in self._paused

    def advance_more(self, sample: Sample, num_tokens: int) -> None:
        """A decode sample computed so many tokens more in a step that was planned than the one that it always does."""
        sample.offset += num_tokens
        self.file(sample)

    def paused_rows(self) -> list[ReqIndex]:
        """Decode rows that do not advance in the step of this tick."""
        return [sample.req_index for sample in self._paused]

    def sampling(self) -> Sampling:
        """Return who samples in the step of this tick."""
        if self._shared is None:
            self._shared = Sampling.of(self._decode_samples)
        if not self._paused:
            return self._shared
        return Sampling.of([sample for sample in self._decode_samples if sample not in self._paused])

    def advance(self) -> None:
        """A RUN step is planned."""
        self.tick += 1
        for sample in self._paused:
            sample.offset -= 1

    def resident(self) -> Iterator[Sample]:
        """Samples with blocks, in no order."""
        return iter(self._victims)

    def check_integrity(self) -> None:
        """Raise AssertionError where the tables do not agree with the samples."""
        assert self._decode_rows == sorted(set(self._decode_rows)), "decode rows are not ascending"
        for row, sample in zip(self._decode_rows, self._decode_samples, strict=True):
            assert sample.req_index == row, f"{sample} is listed under row {row}"
            assert sample.state is SampleState.DECODE, f"{sample} is listed as decode"
            due_at = min(len(sample.block_ids) * self._block_size, sample.limit - 1)
            assert self.num_computed_tokens(sample) <= due_at, f"{sample} overran"
            if sample not in self._paused:
                assert sample.due_tick == due_at - sample.offset, f"{sample} is filed under a wrong tick"
                assert sample in self._due.get(sample.due_tick, ()), f"{sample} is filed nowhere"
        assert {*self._decode_samples, *self._prefilling} == set(self._victims), "residents differ"
        assert self._paused.keys() <= set(self._decode_samples), "a paused sample does not decode"
        seated = [sample.req_index for sample in self._victims]
        assert not set(seated) & set(self._free_rows), "a free row is taken"
