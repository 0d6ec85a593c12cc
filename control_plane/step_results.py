"""Read what the output rank answered to a step, against the plan of that step (PROTOCOL A4).

What it costs grows with what the result says. Who has asked for log-probabilities is looked up once for as long as the
same rows sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from control_plane.deltas import RowPayload, step_tokens
from control_plane.scheduling.plan import ResultMismatch, StepPlan, StepTokens
from control_plane.scheduling.request import Sample
from maniple.v1.sampling_pb2 import RowSampling
from maniple.v1.scheduler_delta_pb2 import RowLogprobs, StepResult
from service_chassis.ids import ReqIndex
from service_chassis.protocol.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of what is said of a prompt."""

    first_position: int
    columns: Logprobs


class StepResults:
    """The results of one group, in step order."""

    def __init__(self) -> None:
        self._samples: Sequence[Sample] = ()  # of the plan before
        self._asked: set[int] = set()  # places in them whose tokens come with log-probabilities

    def read(self, result: StepResult, plan: StepPlan) -> StepTokens:
        """Return what a result says. Raises ``ResultMismatch`` where it does not answer the plan."""
        tokens = step_tokens(result, plan)
        if plan.samples is not self._samples:
            self._samples = plan.samples
            self._asked = {
                place for place, sample in enumerate(plan.samples) if _sampling(sample).num_logprobs_plus_one
            }
        if not result.logprobs and not self._asked:
            return tokens
        try:
            sampled, prompts = self._logprobs(result.logprobs, plan, tokens.counts)
        except ValueError as error:
            raise ResultMismatch(f"step {plan.step}: log-probabilities: {error}") from None
        return replace(tokens, logprobs=sampled, prompt_logprobs=prompts)

    def _logprobs(
        self, told: Sequence[RowLogprobs], plan: StepPlan, counts: Sequence[int]
    ) -> tuple[dict[int, Logprobs], dict[ReqIndex, PromptPart]]:
        sampled: dict[int, Logprobs] = {}
        prompts: dict[ReqIndex, PromptPart] = {}
        chunks = dict(plan.chunks)
        for row in told:
            req_index = ReqIndex(row.req_index)
            if row.HasField("sampled"):
                place = bisect_left(plan.rows, req_index)
                if place not in self._asked or plan.rows[place] != req_index:
                    raise ValueError(f"row {req_index} did not ask for those of its token")
                columns = Logprobs.from_message(row.sampled, _sampling(plan.samples[place]).num_logprobs_plus_one)
                count = counts[place] if counts else 1
                if len(columns) != count or place in sampled:
                    num_tokens = "one token" if count == 1 else f"{count} tokens"
                    raise ValueError(f"row {req_index} samples {num_tokens}, and {len(columns)} are told of")
                sampled[place] = columns
            if row.HasField("prompt"):
                width = _sampling(chunks[req_index]).num_prompt_logprobs_plus_one if req_index in chunks else 0
                if not width:
                    raise ValueError(f"row {req_index} did not ask for those of its prompt")
                prompts[req_index] = PromptPart(row.first_position, Logprobs.from_message(row.prompt, width))
        if len(sampled) < len(self._asked):
            raise ValueError(f"{len(self._asked)} rows asked for them, {len(sampled)} have got them")
        return sampled, prompts


def _sampling(sample: Sample) -> RowSampling:
    payload = sample.request.payload
    assert isinstance(payload, RowPayload), "a request's payload is what row_payload returned"
    return payload.sampling
