"""The scripted model: a runner without weights whose logits are a hash of the row's own tokens.

Its "KV cache" holds one number per slot: h of a token is a hash of the token and of h of the token before, read from
the slot that the row's block table names. So a wrong table, a block reused too early or a bad prefix hit changes the
tokens, as it would with a real model; and tokens depend on nothing but the row: not on its mates, chunks, preemptions
or the number of ranks. Of several ranks each fills its own slots, all meet in every step, and rank 0 says what was
sampled, as with a real model.

Works without torch. Rows that need more than greedy, seeded or forced output then are refused; with torch they go
through the real sampler.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from service_chassis.errors import InvalidParameter, NotBuilt, WrongState
from service_chassis.protocol.arrays import UInt64Array, mix_array, token_terms_sum
from service_chassis.protocol.digest import MASK64, mix, row_factor, token_term
from service_chassis.protocol.logprobs import Logprobs
from service_chassis.scripted import Fault, ScriptedOptions
from service_chassis.sleep_tags import KV_CACHE, WEIGHTS
from worker_service.pooling import Float64Array, Pooler
from worker_service.process_group import OUTPUT_RANK, LoneProcessGroup, ProcessGroup
from worker_service.runner import LoadOptions, MemoryFacts, ModelFacts, Progress
from worker_service.sampling.columns import SamplingColumns, allowed
from worker_service.sampling.logprobs import OutputLogprobs, StepLogprobs, report_arrays
from worker_service.sampling.masked_rows import MaskedRows, of_sampled
from worker_service.scripted_sampling import Float32Array, needs_full_sampler, sample_plainly
from worker_service.speculation.acceptance import num_scores_of, places_of_scores
from worker_service.speculation.agreement import Agreed, agree_on_tries
from worker_service.speculation.tries import with_tries
from worker_service.step_work import (
    NOT_SAMPLED,
    RAW_LOGITS,
    Int32Array,
    NewRow,
    RowLogprobs,
    StepOutput,
    StepWork,
    TableOp,
)
from worker_service.step_work import Float32Array as Vector

if TYPE_CHECKING:
    from worker_service.sampling.sampler import Sampler

REFUSAL = "the scripted model without torch serves greedy, seeded and forced output"
_ROOT = mix(0x6D616E69)  # h before the first token
_LOGIT_IDS = 0x100000000  # ids enter the logits above all tokens, so that a logit never equals a hash of the chain
_HIDDEN_IDS = 0x200000000  # as do the numbers of a hidden state, above those
_HIDDEN_SIZE = 12
_BYTES_PER_SLOT = 8
_MAX_PROFILED_BLOCKS = 16384  # memory is no limit here, but the scheduler keeps a list of free blocks


class InjectedFault(RuntimeError):
    """Raised by a fault of kind "raise"."""


class ScriptedRunner:
    """A ``ModelRunner``; see there. Arrays and dictionaries are indexed by req_index."""

    device = "scripted"
    # What the real sampler reads, once the model is loaded.
    sampling: SamplingColumns
    token_ids: Int32Array  # [max_num_seqs, max_model_len + 1]; known ones lie in [0, num_tokens)
    num_tokens: Int32Array
    num_prompt_tokens: Int32Array

    def __init__(self, options: ScriptedOptions, *, rank: int, may_sleep: bool = False) -> None:
        self._options = options
        self._rank = rank
        self._faults = {fault.step: fault for fault in options.faults if fault.rank == rank}
        # mix(id + 2**32) of every id: the part of the logits that does not depend on the row.
        ids = np.arange(options.vocab_size, dtype=np.uint64) + np.uint64(_LOGIT_IDS)
        self._mixed_ids: UInt64Array = mix_array(ids)
        self._mixed_dims: UInt64Array = mix_array(np.arange(_HIDDEN_SIZE, dtype=np.uint64) + np.uint64(_HIDDEN_IDS))
        self._slots: UInt64Array = np.zeros(0, np.uint64)  # slot -> h of the token there
        self._tables: dict[int, list[int]] = {}  # block ids
        self._keys: dict[int, int] = {}  # row_key of live rows
        self._token_digests: dict[int, int] = {}
        self._forced: dict[int, tuple[int, ...]] = {}  # what a row emits by output index; absent: it samples
        self._full: set[int] = set()  # rows for the real sampler
        self._pooler = Pooler()
        self._masked = MaskedRows()
        self._has_diverged = False  # by a fault; from then on, as a wrong token would stay in its row
        self._sampler: Sampler | None = None
        self._group: ProcessGroup = LoneProcessGroup("")
        self._may_sleep = may_sleep
        self._asleep: set[str] = set()

    def join(self, group: ProcessGroup) -> None:
        self._group = group

    def load_model(self, options: LoadOptions, progress: Progress) -> ModelFacts:
        if options.dtype not in ("auto", "float32"):
            raise InvalidParameter("dtype", options.dtype, "the scripted model computes in float32")
        if options.quantization != "none":
            raise InvalidParameter("quantization", options.quantization, "the scripted model has no weights")
        if options.max_model_len > self._options.max_position:
            rule = f"must be at most the model's {self._options.max_position}"
            raise InvalidParameter("max_model_len", options.max_model_len, rule)
        self._load = options
        self._max_model_len = options.max_model_len or self._options.max_position
        self._fire(0)
        started = time.monotonic()
        while (spent := time.monotonic() - started) < self._options.load_time_s:
            progress(spent / self._options.load_time_s, "pretending to read a checkpoint")
            time.sleep(min(0.05, self._options.load_time_s - spent))
        self.sampling = SamplingColumns(options.max_num_seqs, self._options.vocab_size)
        self.token_ids = np.zeros((options.max_num_seqs, self._max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(options.max_num_seqs, np.int32)
        self.num_prompt_tokens = np.zeros(options.max_num_seqs, np.int32)
        return ModelFacts(
            source=options.model,
            architecture="ScriptedModel",
            vocab_size=self._options.vocab_size,
            max_position=self._options.max_position,
            dtype="float32",
            weight_bytes=0,
            block_bytes=options.block_size * _BYTES_PER_SLOT,
            hidden_size=_HIDDEN_SIZE,
            num_layers=1,
        )

    def profile_memory(self, gpu_memory_utilization: float) -> MemoryFacts:
        blocks_of_all_rows = self._load.max_num_seqs * -(-self._max_model_len // self._load.block_size) + 1
        kv_bytes = min(blocks_of_all_rows, _MAX_PROFILED_BLOCKS) * self._load.block_size * _BYTES_PER_SLOT
        return MemoryFacts(
            kv_bytes=kv_bytes,
            weight_bytes=0,
            activation_bytes=0,
            total_bytes=kv_bytes,
            foreign_bytes=0,
            base_bytes=0,
            free_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self._group.num_sharing,
            step_us_per_token=self._options.step_time_per_token_s * 1e6,
        )

    def allocate_kv_cache(self, num_blocks: int) -> int:
        self._slots = np.zeros(num_blocks * self._load.block_size, np.uint64)
        return self._slots.nbytes

    def warm_up(self, capture_sizes: tuple[int, ...], enforce_eager: bool, progress: Progress) -> int:
        if self._options.sampler == "torch":
            self._real_sampler()
        progress(1.0, "nothing to capture")
        return 0

    def apply(self, work: StepWork) -> None:
        self._pooler.apply(work)
        self._masked.apply(work, self.num_tokens)
        for finished in work.finished:
            self._remove(finished.req_index)
        for req_index in work.preempted:
            self._tables[req_index] = []
        if work.block_copies:
            blocks = self._slots.reshape(-1, self._load.block_size)
            sources, destinations = zip(*((src, dst) for _, src, dst in work.block_copies), strict=True)
            # The right side is copied as a whole before anything is written.
            blocks[list(destinations)] = blocks[list(sources)]
        for new in work.new_rows:
            self._enter(new)
        for change in work.table_changes:
            table = self._tables[change.req_index]
            if change.op is TableOp.APPEND:
                table.extend(change.block_ids)
            elif change.op is TableOp.REPLACE:
                table[:] = change.block_ids
            else:
                raise NotBuilt(f"the scripted model has full attention only: {change.op.name} of a block table")

    def _enter(self, new: NewRow) -> None:
        row, tokens = new.req_index, self.token_ids[new.req_index]
        if new.fork_of is None:
            num_tokens = len(new.token_ids)
            tokens[:num_tokens] = new.token_ids
            self._tables[row] = []
        else:
            num_tokens = new.num_prefill_tokens
            tokens[:num_tokens] = self.token_ids[new.fork_of, :num_tokens]
            self._tables[row] = list(self._tables[new.fork_of])
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self._keys[row] = new.row_key
        self._token_digests[row] = token_terms_sum(new.row_key, 0, tokens[:num_tokens])
        self.sampling.add(row, new.sampling, new.sample_index, fork_of=new.fork_of)
        by_prompt = self._options.forced_by_prompt
        forced = by_prompt.get(tuple(tokens[: new.num_prompt_tokens].tolist())) if by_prompt else None
        if forced or self._options.forced:
            self._forced[row] = forced or self._options.forced
        elif self._options.sampler == "torch" or needs_full_sampler(new.sampling):
            self._real_sampler()
            self._full.add(row)

    def _remove(self, req_index: int) -> None:
        del self._tables[req_index], self._keys[req_index], self._token_digests[req_index]
        self._forced.pop(req_index, None)
        self._full.discard(req_index)
        self.sampling.remove(req_index)

    def _real_sampler(self) -> Sampler:
        """Return the sampler that real models have. Its import takes seconds, so only rows that need it ask."""
        if self._sampler is None:
            if self._options.sampler == "numpy":
                raise NotBuilt(REFUSAL)
            try:
                from worker_service.sampling.sampler import Sampler
            except ImportError:
                raise NotBuilt(REFUSAL) from None
            self._sampler = Sampler(self)
        return self._sampler

    def execute(self, work: StepWork) -> StepOutput:
        started = time.monotonic()
        fault = self._fire(work.step)
        work = with_tries(work, self)
        spans = zip(
            work.rows.tolist(), work.num_computed_tokens.tolist(), work.num_scheduled_tokens.tolist(), strict=True
        )
        last = np.array([self._compute(*span) for span in spans], np.uint64)
        positions = work.num_computed_tokens + work.num_scheduled_tokens
        self._group.barrier()  # where the layers of a real model meet
        vectors = self._pool(work)
        telling = StepLogprobs(self.sampling.logprobs, work, self.num_prompt_tokens)
        num_computed = int(work.num_scheduled_tokens.sum())
        wanted_s = self._options.step_time_s + num_computed * self._options.step_time_per_token_s
        if (left_s := started + wanted_s - time.monotonic()) > 0:
            time.sleep(left_s)
        sampling_ns = time.monotonic_ns()
        num_tokens = None
        if work.speculation is None:
            token_ids, logprobs = self._decide(
                work, work.rows[work.samples], positions[work.samples], last[work.samples], telling
            )
        else:
            agreed = self._agree_on_tries(work, telling)
            token_ids, num_tokens, logprobs = agreed.token_ids, agreed.num_tokens, agreed.logprobs
        if fault is not None and fault.kind == "wrong_digest":
            self._has_diverged = True
        return StepOutput(
            step=work.step,
            token_ids=token_ids,
            token_digest=sum(self._token_digests.values()) & MASK64 ^ self._has_diverged,
            device_us=int((time.monotonic() - started) * 1e6),
            sampling_ns=sampling_ns,
            vectors=vectors,
            logprobs=logprobs,
            num_tokens=num_tokens,
        )

    def _pool(self, work: StepWork) -> tuple[Vector, ...]:
        """Pool hidden states, which are made of h of each token: numbers in [-1, 1)."""
        if self._group.rank != OUTPUT_RANK:
            return ()

        def sum_of(place: int, start: int, stop: int) -> Float64Array:
            size, table = self._load.block_size, np.array(self._tables[int(work.rows[place])], np.int64)
            positions = np.arange(start, stop)
            h = self._slots[table[positions // size] * size + positions % size]
            hashed: UInt64Array = mix_array(h[:, None] ^ self._mixed_dims) >> np.uint64(40)
            total: Float64Array = (hashed.astype(np.float64) * 2.0**-23 - 1).sum(axis=0)
            return total

        return self._pooler.take(work, sum_of)

    def _compute(self, req_index: int, start: int, count: int) -> int:
        """Fill the slots of positions [start, start + count) and return h of the last."""
        size, table = self._load.block_size, self._tables[req_index]
        h = _ROOT if start == 0 else int(self._slots[table[(start - 1) // size] * size + (start - 1) % size])
        for position, token in enumerate(self.token_ids[req_index, start : start + count].tolist(), start):
            h = mix(h ^ mix(token + 1))
            self._slots[table[position // size] * size + position % size] = h
        return h

    def _decide(
        self, work: StepWork, rows: Int32Array, positions: Int32Array, last: UInt64Array, telling: StepLogprobs
    ) -> tuple[Int32Array, tuple[RowLogprobs, ...]]:
        """Have rank 0 choose the token at ``positions`` of ``rows``, and know it from now on."""
        if len(rows) == 0 and not telling.spans:
            return np.zeros(0, np.int32), ()
        own = b""
        if self._group.rank == OUTPUT_RANK:
            self._masked.await_masks(work, self.sampling)
            chosen, sampled = self._sample(rows, positions, last)
            own = telling.to_bytes(self._masked.decide(rows, chosen), sampled, self._prompt_logprobs(telling))
        token_ids, logprobs = telling.from_bytes(self._group.broadcast(own))
        self._masked.follow(rows, token_ids)
        given = token_ids != NOT_SAMPLED
        self._append(rows[given], token_ids[given])
        return token_ids, of_sampled(rows, token_ids, logprobs)

    def _append(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Make one token of each row known."""
        for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            position = int(self.num_tokens[row])
            self.token_ids[row, position] = token
            self.num_tokens[row] = position + 1
            self._token_digests[row] += token_term(row_factor(self._keys[row]), position, token)

    def _agree_on_tries(self, work: StepWork, telling: StepLogprobs) -> Agreed:
        """As ``_decide``, where some rows try tokens ahead."""
        prompts: list[Logprobs] = []
        h: UInt64Array = np.zeros(0, np.uint64)
        if self._group.rank == OUTPUT_RANK:
            self._masked.await_masks(work, self.sampling)
            prompts = self._prompt_logprobs(telling)
            starts, counts = work.num_computed_tokens.tolist(), work.num_scheduled_tokens.tolist()
            spans = zip(work.rows.tolist(), starts, counts, strict=True)
            of_tokens = [self._hashes(row, start, start + count) for row, start, count in spans]
            h = np.concatenate(of_tokens)[places_of_scores(work, num_scores_of(work))]
        return agree_on_tries(
            work,
            self,
            self._masked,
            telling,
            prompts,
            self._group,
            sample=lambda places, rows: self._sample(rows, self.num_tokens[rows], h[places]),
            append=self._append,
        )

    def _prompt_logprobs(self, telling: StepLogprobs) -> list[Logprobs]:
        """Report on the positions of prompts that are told with this step."""
        found = []
        for span in telling.spans:
            columns = Logprobs(span.num_likeliest + 1)
            for start, stop in span.slices():
                first, end = span.first_position + start, span.first_position + stop
                scores = self._logits(self._hashes(span.req_index, first - 1, end - 1))
                tokens = self.token_ids[span.req_index, first:end]
                said = report_arrays(scores, tokens, span.num_likeliest, span.mode != RAW_LOGITS)
                columns.extend(said.columns(0, stop - start, span.num_likeliest))
            found.append(columns)
        return found

    def _hashes(self, req_index: int, start: int, stop: int) -> UInt64Array:
        """Return h of computed positions [start, stop) of a row."""
        size, table = self._load.block_size, np.array(self._tables[req_index], np.int64)
        positions = np.arange(start, stop)
        h: UInt64Array = self._slots[table[positions // size] * size + positions % size]
        return h

    def _sample(
        self, rows: Int32Array, positions: Int32Array, last: UInt64Array
    ) -> tuple[Int32Array, dict[int, Logprobs]]:
        """Choose the token at ``positions`` of ``rows``, whose last h is ``last``; report on the rows that asked."""
        token_ids = np.zeros(len(rows), np.int32)
        told: dict[int, Logprobs] = {}  # req_index -> of its token
        forced_places: list[int] = []
        full: list[int] = []  # places
        plain: list[int] = []
        for place, row in enumerate(rows.tolist()):
            forced = self._forced.get(row)
            if forced is not None:
                index = int(positions[place] - self.num_prompt_tokens[row])
                token_ids[place] = forced[index] if index < len(forced) else self._options.eos_token_id
                if (mask := self.sampling.masks.get(row)) is not None:
                    may_be = allowed(mask, self._options.vocab_size)
                    if not may_be[token_ids[place]]:
                        token_ids[place] = may_be.argmax()  # as if all others had equal scores
                forced_places.append(place)
            else:
                (full if row in self._full else plain).append(place)
        if noting := OutputLogprobs(self.sampling.logprobs, rows[forced_places]):
            scores = self._logits(last[forced_places])
            noting.note_raw(scores)
            noting.note_processed(scores)
            told |= noting.take(token_ids[forced_places], report_arrays)
        if plain:
            noting = OutputLogprobs(self.sampling.logprobs, rows[plain])
            token_ids[plain] = sample_plainly(
                self._logits(last[plain]),
                rows[plain],
                positions[plain],
                self.num_prompt_tokens[rows[plain]],
                self.sampling,
                noting,
            )
            told |= noting.take(token_ids[plain], report_arrays)
        if full:
            import torch

            from worker_service.sampling.tensor_logprobs import report_tensors

            noting = OutputLogprobs(self.sampling.logprobs, rows[full])
            logits = torch.from_numpy(self._logits(last[full]))
            token_ids[full] = self._real_sampler().sample(logits, rows[full], noting)
            told |= noting.take(token_ids[full], report_tensors)
        return token_ids, told

    def _logits(self, last: UInt64Array) -> Float32Array:
        """Return [num_rows, vocab_size] from h of each row's last token: 24 random bits as a number in [0, 8)."""
        hashed: npt.NDArray[np.uint64] = mix_array(last[:, None] ^ self._mixed_ids) >> np.uint64(40)
        return hashed.astype(np.float32) * np.float32(8 / 2**24)

    def known_tokens(self, req_index: int) -> list[int]:
        known: list[int] = self.token_ids[req_index, : self.num_tokens[req_index]].tolist()
        return known

    def reset(self) -> None:
        for req_index in list(self._keys):
            self._remove(req_index)
        self._pooler.clear()
        self._masked.clear()

    # It has a cache to give back, and no weights.

    @property
    def asleep(self) -> frozenset[str]:
        return frozenset(self._asleep)

    def taken_bytes(self) -> int:
        return self._slots.nbytes

    def sleep(self, level: int) -> int:
        if not self._may_sleep:
            raise WrongState("this worker was not started with --enable-sleep-mode")
        self._asleep.add(WEIGHTS)
        if KV_CACHE in self._asleep:
            return 0
        self._asleep.add(KV_CACHE)
        num_slots, num_bytes = len(self._slots), self._slots.nbytes
        self._slots = np.zeros(0, np.uint64)
        self._num_sleeping_slots = num_slots
        return num_bytes

    def wake_up(self, tags: Collection[str], progress: Progress) -> None:
        if KV_CACHE in self._asleep and KV_CACHE in tags:
            self._slots = np.zeros(self._num_sleeping_slots, np.uint64)
        self._asleep.difference_update(tags)

    def stage_weights(self, path: str, progress: Progress) -> int:
        raise InvalidParameter("path", path, "the scripted model has no weights")

    def put_staged_weights(self) -> None:
        raise WrongState("the scripted model has no weights")

    def unstage_weights(self) -> None:
        """There is nothing."""

    def _fire(self, step: int) -> Fault | None:
        """Do what the fault of this step says, if there is one."""
        fault = self._faults.pop(step, None)
        if fault is None:
            return None
        time.sleep(fault.after_s)
        match fault.kind:
            case "raise":
                raise InjectedFault(f"injected at rank {self._rank}, step {step}")
            case "hang":
                threading.Event().wait()
            case "exit":
                os._exit(3)
            case "abort":
                os.abort()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "wrong_digest":
                pass  # told when the step is done
        return fault
