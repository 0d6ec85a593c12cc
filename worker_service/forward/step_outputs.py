"""Turn the hidden states of a step into what it says: sampled tokens, log-probabilities, pooled vectors.

Rank 0, which has the logits, decides; all ranks follow what it decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from service_chassis.protocol.logprobs import Logprobs
from worker_service.forward.device_copies import Landing, to_device
from worker_service.forward.launched_step import NothingSampled, Outcome
from worker_service.input_batch import InputBatch
from worker_service.models.registry import Model
from worker_service.pooling import Float64Array, Pooler
from worker_service.process_group import OUTPUT_RANK, ProcessGroup
from worker_service.sampling.choose import LaunchingSampler, choose_sampler
from worker_service.sampling.logprobs import OutputLogprobs, StepLogprobs
from worker_service.sampling.masked_rows import MaskedRows, of_sampled
from worker_service.sampling.sampler import check_finite
from worker_service.sampling.tensor_logprobs import report_tensors
from worker_service.speculation.acceptance import Int64Array, num_scores_of, places_of_scores
from worker_service.speculation.agreement import Agreed, agree_on_tries
from worker_service.step_work import NOT_SAMPLED, RAW_LOGITS, Float32Array, Int32Array, RowLogprobs, StepWork

NOTHING_SAMPLED = np.zeros(0, np.int32)


def _sampled_tokens(work: StepWork) -> Int64Array:
    """Return the last token of each row that samples, by its place in the step."""
    tokens: Int64Array = np.cumsum(work.num_scheduled_tokens, dtype=np.int64)[work.samples] - 1
    return tokens


@dataclass(frozen=True, slots=True)
class Said:
    """What one step says, in the terms of ``StepOutput``."""

    token_ids: Int32Array = field(default_factory=lambda: NOTHING_SAMPLED)
    logprobs: tuple[RowLogprobs, ...] = ()
    vectors: tuple[Float32Array, ...] = ()  # on the output rank
    num_tokens: Int32Array | None = None


class StepOutputs:
    """Used by the device thread alone."""

    def __init__(self, model: Model, batch: InputBatch, device: torch.device) -> None:
        self.sampler = choose_sampler(batch, device)
        self._model = model
        self._batch = batch
        self._device = device
        self._pooler = Pooler()
        self._masked = MaskedRows()

    def apply(self, work: StepWork) -> None:
        """Follow the rows of a delta, before the batch does."""
        self._masked.apply(work, self._batch.num_tokens)
        self._pooler.apply(work)

    def clear(self) -> None:
        """Forget all rows."""
        self._pooler.clear()
        self._masked.clear()

    def wanted(self, work: StepWork) -> Int64Array | None:
        """Return the tokens of a step whose hidden states are looked at, in order; None: all may be."""
        if work.speculation is not None or self._pooler.has_rows(work):
            return None
        if any(asked.num_prompt is not None for asked in self._batch.sampling.logprobs.values()):
            return None
        if np.count_nonzero(work.samples) == work.num_scheduled_tokens.sum():
            return None
        return _sampled_tokens(work)

    def take(self, work: StepWork, hidden: Tensor, group: ProcessGroup) -> Said:
        """Sample, report and pool; append what was sampled to the batch. All ranks of ``group`` call it."""
        vectors = self._pool(work, hidden) if group.rank == OUTPUT_RANK else ()
        batch = self._batch
        rows = work.rows[work.samples]
        telling = StepLogprobs(batch.sampling.logprobs, work, batch.num_prompt_tokens)
        prompts = self._prompt_logprobs(telling, hidden)
        if len(rows) == 0 and not telling.spans:
            return Said(vectors=vectors)
        if work.speculation is not None:
            agreed = self._agree_on_tries(work, hidden, telling, prompts, group)
            return Said(agreed.token_ids, agreed.logprobs, vectors, agreed.num_tokens)
        if len(hidden) > len(rows):
            hidden = hidden[torch.from_numpy(_sampled_tokens(work)).to(self._device)]
        logits = self.compute_logits(hidden) if len(rows) else None
        sampled, logprobs = self._agree(logits, work, telling, prompts, group)
        self._masked.follow(rows, sampled)
        given = sampled != NOT_SAMPLED
        batch.append(rows[given], sampled[given])
        return Said(sampled, of_sampled(rows, sampled, logprobs), vectors)

    def is_plain(self, work: StepWork) -> bool:
        """Say whether all that a step says are tokens, and none of its rows needs tokens of before on the host.

        Asked before the work is applied, and after: rows that leave with it may only make the answer a needless no.
        """
        if len(work.rows) == 0:
            return False  # nothing to launch
        columns = self._batch.sampling
        for new in work.new_rows:
            asked = new.sampling
            if asked.bad_words or asked.num_logprobs is not None or asked.num_prompt_logprobs is not None:
                return False
        if work.speculation is not None or work.awaits_mask or self._masked.has_void or self._pooler.has_rows(work):
            return False
        wanting = columns.bad_words.keys() | columns.logprobs.keys()
        return not wanting or wanting.isdisjoint(work.rows.tolist())

    def launch(self, work: StepWork, hidden: Tensor) -> Outcome:
        """Sample on the device for a plain step of one rank; what comes out is the caller's to append."""
        assert isinstance(self.sampler, LaunchingSampler)
        rows = work.rows[work.samples]
        if len(rows) == 0:
            return NothingSampled(Landing(hidden[:1, 0]).wait)
        if len(hidden) > len(rows):
            hidden = hidden[to_device(_sampled_tokens(work), self._device)]
        logits = self.compute_logits(hidden)
        assert logits is not None
        return self.sampler.launch(logits, rows)

    def _agree_on_tries(
        self, work: StepWork, hidden: Tensor, telling: StepLogprobs, prompts: list[Logprobs], group: ProcessGroup
    ) -> Agreed:
        """As ``_agree``, where some rows try tokens ahead; append what was sampled."""
        columns = self._batch.sampling
        places = torch.from_numpy(places_of_scores(work, num_scores_of(work)))
        logits = self.compute_logits(hidden[places.to(self._device)])
        if group.rank == OUTPUT_RANK:
            self._masked.await_masks(work, columns)

        def sample(places: Int64Array, rows: Int32Array) -> tuple[Int32Array, dict[int, Logprobs]]:
            assert logits is not None
            noting = OutputLogprobs(columns.logprobs, rows)
            token_ids = self.sampler.sample(logits[torch.from_numpy(places).to(self._device)], rows, noting)
            return token_ids, noting.take(token_ids, report_tensors)

        return agree_on_tries(
            work, self._batch, self._masked, telling, prompts, group, sample=sample, append=self._batch.append
        )

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Return the scores of some tokens, on rank 0."""
        return self._model.logits(hidden)

    def _prompt_logprobs(self, telling: StepLogprobs, hidden: Tensor) -> list[Logprobs]:
        """Report on the positions of prompts that are told with this step, a slice at a time; on rank 0."""
        found = []
        for span in telling.spans:
            columns = Logprobs(span.num_likeliest + 1)
            for start, stop in span.slices():
                logits = self._model.logits(hidden[span.first_place + start : span.first_place + stop])
                if logits is not None:
                    first = span.first_position + start
                    check_finite(logits, lambda place: f"row {span.req_index}, position {first + place}")  # noqa: B023
                    tokens = self._batch.token_ids[span.req_index, first : span.first_position + stop]
                    said = report_tensors(logits, tokens, span.num_likeliest, span.mode != RAW_LOGITS)
                    columns.extend(said.columns(0, stop - start, span.num_likeliest))
            found.append(columns)
        return found

    def _pool(self, work: StepWork, hidden: Tensor) -> tuple[Float32Array, ...]:
        """Pool hidden states where they are asked for: all ranks have them, the output rank answers."""
        if self._pooler.is_empty:
            return ()
        starts = np.cumsum(work.num_scheduled_tokens) - work.num_scheduled_tokens - work.num_computed_tokens

        def sum_of(place: int, start: int, stop: int) -> Float64Array:
            first = int(starts[place])
            return self._model.final_hidden(hidden[first + start : first + stop]).double().sum(dim=0).cpu().numpy()

        return self._pooler.take(work, sum_of)

    def _agree(
        self,
        logits: Tensor | None,
        work: StepWork,
        telling: StepLogprobs,
        prompts: list[Logprobs],
        group: ProcessGroup,
    ) -> tuple[Int32Array, tuple[RowLogprobs, ...]]:
        """Have rank 0, which has the logits, decide the tokens of the rows and tell the others, who keep it all too."""
        own = b""
        if group.rank == OUTPUT_RANK:
            rows, sampled, told = work.rows[work.samples], NOTHING_SAMPLED, {}
            if logits is not None:
                self._masked.await_masks(work, self._batch.sampling)
                sampled = self.sampler.sample(logits, rows, telling.output)
                told = telling.output.take(sampled, report_tensors)
            own = telling.to_bytes(self._masked.decide(rows, sampled), told, prompts)
        return telling.from_bytes(group.broadcast(own))
