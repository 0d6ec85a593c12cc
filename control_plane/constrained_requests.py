"""The requests of one engine whose output must match something: their grammars, and the masks that steps wait for.

A mask is sent for the oldest step without an answer: what its rows have sampled before is then known. Nothing is
decided here about how a sample ends. Where its grammar leaves nothing but the end of text, that is what its mask
allows, and sampling it ends the sample like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from control_plane.scheduling.plan import StepPlan
from control_plane.scheduling.request import Request, Sample, SampleState
from control_plane.structured_output.constraint import Constraint, shown
from control_plane.structured_output.mask_rules import mask_rules
from control_plane.structured_output.row_masks import RowMasks
from service_chassis.errors import InvalidParameter, ManipleError, NotBuilt, QueueFull
from service_chassis.ids import RequestId

if TYPE_CHECKING:
    from control_plane.live_request import LiveRequest
    from control_plane.structured_output.compiler import Grammar, GrammarCompiler

# Adopted requests are compiled for beside new ones, and must not crowd them out.
_NUM_ADOPTING = 8
_RETRY_S = 0.2


class ConstrainedRequests:
    """Event loop; owned by an engine.

    Args:
        compiler: shared by all engines of a control plane; None: there is none.
        vocab_size: of the model on the workers.
        send: given a plan and a mask for each of its masked rows.
        hold: keeps a request out of steps, or lets it go on.
        fail: ends a request.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        *,
        vocab_size: int,
        send: Callable[[StepPlan, Sequence[bytes]], None],
        hold: Callable[[RequestId, bool], object],
        fail: Callable[[RequestId, ManipleError], object],
    ) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._send = send
        self._hold = hold
        self._fail = fail
        self._masks: RowMasks[Sample] = RowMasks(self._send_if_ready, self._on_fault)
        self._here: dict[RequestId, tuple[Constraint, list[Sample]]] = {}
        self._awaited: StepPlan | None = None  # the oldest without an answer whose rows wait for masks
        self._sent_step = 0  # the last whose masks were sent
        self._adopting = asyncio.Semaphore(_NUM_ADOPTING)
        self._tasks: set[asyncio.Task[None]] = set()

    async def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint. Raises ``InvalidParameter``, ``QueueFull`` and ``NotBuilt``."""
        if self._compiler is None:
            raise NotBuilt(f"{constraint.field} is not available here")
        return await self._compiler.compile(constraint)

    def enter(self, live: LiveRequest, request: Request) -> None:
        """Let a request in that the scheduler has; without a grammar, as it comes from another owner, it is held."""
        sampling = live.generation.sampling
        if (constraint := sampling.constraint) is None:
            return
        rules = mask_rules(sampling, self._vocab_size)
        samples = [sample for sample in request.samples if sample.state is not SampleState.FINISHED]
        self._here[request.request_id] = constraint, samples
        for sample in samples:
            self._masks.enter(sample, rules)
        if live.grammar is not None:
            self._begin(samples, live.grammar)
            return
        self._hold(request.request_id, True)
        task = asyncio.create_task(self._adopt(live, request, constraint, samples))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self, samples: Sequence[Sample], grammar: Grammar) -> None:
        outputs = [(sample, sample.token_ids[len(sample.request.prompt_token_ids) :]) for sample in samples]
        self._masks.begin(outputs, grammar)

    async def _adopt(self, live: LiveRequest, request: Request, constraint: Constraint, samples: list[Sample]) -> None:
        request_id = request.request_id
        async with self._adopting:
            while self._is_here(request_id, samples):
                try:
                    live.grammar = await self.compile(constraint)
                except QueueFull:
                    await asyncio.sleep(_RETRY_S)
                    continue
                except ManipleError as error:
                    if self._is_here(request_id, samples):
                        self._fail(request_id, error)
                    return
                break
        if live.grammar is not None and self._is_here(request_id, samples):
            self._begin(samples, live.grammar)
            self._hold(request_id, False)

    def _is_here(self, request_id: RequestId, samples: list[Sample]) -> bool:
        return request_id in self._here and self._here[request_id][1] is samples

    def take_tokens(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """Take what a step's rows have sampled, once the scheduler has."""
        if not plan.masked:
            return
        tokens: Mapping[int, int] = dict(zip(plan.rows, token_ids, strict=True))
        going_on = [
            (sample, tokens[row])
            for row, sample in zip(plan.masked_rows, plan.masked, strict=True)
            if not _has_ended(sample)
        ]
        self._masks.advance(going_on)

    def await_step(self, oldest: StepPlan | None) -> None:
        """Say which step is the oldest without an answer; its masks go as soon as they are there, once."""
        wanted = oldest if oldest is not None and oldest.masked else None
        if wanted is not None and (self._awaited is None or self._awaited.step < wanted.step):
            self._awaited = wanted
            self._send_if_ready()

    def _send_if_ready(self) -> None:
        plan = self._awaited
        if plan is None or plan.step == self._sent_step:
            return
        masks = self._masks.ready(plan.masked, _has_ended)
        if masks is not None:
            self._sent_step = plan.step
            self._send(plan, masks)

    def _on_fault(self, sample: Sample, why: str) -> None:
        found = self._here.get(sample.request.request_id)
        if found is not None and sample in found[1] and not _has_ended(sample):
            constraint = found[0]
            self._fail(sample.request.request_id, InvalidParameter(constraint.field, shown(constraint), why))

    def leave(self, request_id: RequestId) -> None:
        """Let a request go that ended, or goes on elsewhere."""
        found = self._here.pop(request_id, None)
        if found is not None:
            self._masks.forget(found[1])
            # It may be what a step on its way waits for.
            self._send_if_ready()

    def close(self) -> None:
        """End what was started here."""
        for task in self._tasks:
            task.cancel()
        self._masks.close()


def _has_ended(sample: Sample) -> bool:
    return sample.state is SampleState.FINISHED
