"""Choose which decode rows try tokens ahead, and keep count of what came of it (PROTOCOL B11).

What is tried is proposed by the workers, who know the tokens: it is what followed when a row's last tokens occurred
before. Here it is decided who may try, and how many, since that takes blocks and a part of the step's budget. Trying is
for what is left over: it preempts nobody, and prefill goes first.

A row that tried in vain a few times rests, ever longer: rows whose text does not repeat itself are hardly visited.
"""

from __future__ import annotations

from collections import defaultdict

from control_plane.scheduling.batch import Batch
from control_plane.scheduling.plan import RowChange
from control_plane.scheduling.request import Sample, SampleState
from control_plane.scheduling.tables import Tables
from service_chassis.ids import BlockId, ReqIndex, Step

# Tries in vain, in a row, before a row rests; then 2, 4, … steps, up to the most.
PATIENCE = 4
LONGEST_REST = 16


class Speculation:
    """The samples of one scheduler that try tokens ahead, or have. Owned by the scheduler."""

    def __init__(self, num_tokens: int, batch: Batch, tables: Tables, block_size: int) -> None:
        """Begin with nobody; ``num_tokens`` are tried at most, 0: none."""
        self._num_tokens = num_tokens
        self._batch = batch
        self._tables = tables
        self._block_size = block_size
        self.num_accepted = 0  # tokens
        # Who is looked at in each step: whoever may try, and whose count has to be set right.
        self._visited: dict[Sample, None] = {}
        self._resting: defaultdict[int, list[Sample]] = defaultdict(list)  # by the tick at which they try again

    def __bool__(self) -> bool:
        return bool(self._visited or self._resting)

    def enter(self, sample: Sample) -> None:
        """A sample decodes from now on."""
        if sample.unsettled or self._may_try(sample):
            sample.tries_in_vain = sample.tries_from = 0
            self._visited[sample] = None

    def _may_try(self, sample: Sample) -> bool:
        # What a mask allows behind a token is not known before the token is.
        return bool(self._num_tokens) and not sample.request.masked

    def plan(self, changes: dict[ReqIndex, RowChange], step: Step, budget: int) -> dict[ReqIndex, int]:
        """Mention the rows that try in ``step``, and those whose count was too high.

        Args:
            changes: of the step so far; is added to.
            step: the one that is planned.
            budget: tokens of the step that nobody else has taken.
        Returns:
            How many tokens each of those that try may yield besides the one that it yields anyway.
        """
        tick = self._batch.tick
        for sample in self._resting.pop(tick, ()):
            self._visited[sample] = None
        tries: dict[ReqIndex, int] = {}
        for sample in list(self._visited):
            if sample.state is not SampleState.DECODE:
                del self._visited[sample]  # it comes back when it decodes again
            elif sample.decode_since < step and not self._batch.is_paused(sample):
                num_tries = self._plan_one(changes, sample, budget if tick >= sample.tries_from else 0)
                if num_tries:
                    tries[sample.req_index] = num_tries
                    budget -= num_tries
                elif not self._may_try(sample):
                    del self._visited[sample]
                elif sample.tries_from > tick:
                    del self._visited[sample]
                    self._resting[sample.tries_from].append(sample)
        return tries

    def _plan_one(self, changes: dict[ReqIndex, RowChange], sample: Sample, budget: int) -> int:
        num_computed = self._batch.num_computed_tokens(sample)
        blocks: tuple[BlockId, ...] = ()
        place = len(sample.block_ids)
        num_tries = 0
        if self._may_try(sample):
            # Of the tokens that it will know then, the last is not computed.
            most = min(self._num_tokens, budget, sample.limit - num_computed - 2)
            blocks = self._make_room(sample, num_computed + 1 + most)
            num_tries = max(0, min(most, len(sample.block_ids) * self._block_size - num_computed - 1))
        if not (num_tries or blocks or sample.unsettled):
            return 0
        before = changes.get(sample.req_index)
        changes[sample.req_index] = RowChange(
            sample.req_index,
            1 + num_tries if num_tries else None,
            standing_advance=int(num_tries > 0),
            settles=sample.unsettled,
            num_computed_tokens=num_computed if sample.unsettled else 0,
            append=(*before.append, *blocks) if before is not None else blocks,
            append_at=before.append_at if before is not None else place,
        )
        sample.unsettled = num_tries
        return num_tries

    def _make_room(self, sample: Sample, num_tokens: int) -> tuple[BlockId, ...]:
        """Give a sample blocks for so many tokens, as far as others do not need them: a block each to go on with."""
        blocks: tuple[BlockId, ...] = ()
        while (
            len(sample.block_ids) * self._block_size < num_tokens
            and self._tables.pool.num_available > self._batch.num_resident
        ):
            blocks += self._tables.grow(sample)
        if blocks:
            self._batch.file(sample)
        return blocks

    def take(self, sample: Sample, num_accepted: int) -> None:
        """So many of the tokens that a living sample tried in the step before were accepted."""
        if num_accepted:
            self.num_accepted += num_accepted
            sample.unsettled -= num_accepted
            self._batch.advance_more(sample, num_accepted)
            sample.tries_in_vain = 0
            return
        sample.tries_in_vain += 1
        if (beyond := sample.tries_in_vain - PATIENCE) >= 0:
            sample.tries_from = self._batch.tick + min(2 << beyond, LONGEST_REST)
