"""Choose the next token of each row on the device: what ``sampler`` does, in kernels that the host only launches.

Same order, same noise, same ties. Nothing here waits for the device: what was sampled is on its way to the host when
``launch`` returns, and lies on the device for the inputs of the next step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maniple_kernels.gpu.logprobs import gather_logprobs
from maniple_kernels.gpu.mask import apply_mask_
from maniple_kernels.gpu.sample import sample
from worker_service.forward.device_copies import Landing, to_device
from worker_service.forward.staged_array import StagedArray
from worker_service.sampling.columns import SamplingColumns
from worker_service.sampling.device_penalties import DevicePenalties
from worker_service.sampling.logprobs import OutputLogprobs
from worker_service.sampling.noise_keys import noise_keys
from worker_service.sampling.sampler import KnownTokens, NonFiniteLogits, ends_with
from worker_service.step_work import Bits, Int32Array

_WORDS_A_ROW = 7  # of the staged columns
_ALIGNED = 4  # words: kernels are compiled for columns that begin at multiples of 16 bytes


class LaunchedSampling:
    """What was sampled for some rows, perhaps not computed yet."""

    def __init__(self, token_ids: Tensor, is_finite: Tensor, rows: Int32Array, positions: Int32Array) -> None:
        self.token_ids = token_ids  # [num_rows] int32, on the device
        self._landing = Landing(torch.stack((token_ids, is_finite.to(torch.int32))))
        self._rows = rows
        self._positions = positions

    def wait(self) -> None:
        """Wait until it is computed. Any thread."""
        self._landing.wait()

    def take(self) -> Int32Array:
        """Return [num_rows] token ids, once they are there.

        Raises:
            NonFiniteLogits: a row holds NaN or an infinity.
        """
        token_ids: Int32Array
        token_ids, is_finite = self._landing.take().astype(np.int32, copy=False)
        for place in np.flatnonzero(is_finite == 0).tolist():
            where = f"row {self._rows[place]}, position {self._positions[place]}"
            raise NonFiniteLogits(f"the model's logits are not finite: {where}")
        return token_ids


class DeviceSampler:
    """Samples one token for each of some rows of one batch. Device thread."""

    def __init__(self, batch: KnownTokens, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        vocab_size, max_num_seqs = batch.sampling.vocab_size, len(batch.num_tokens)
        # What each row sampled last, by req_index: inputs of the next step that the host need not know.
        self.latest = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._columns = StagedArray((_WORDS_A_ROW * (max_num_seqs + _ALIGNED),), torch.int32, device)
        self._penalties = DevicePenalties(vocab_size, device)
        self._num_words = -(-vocab_size // 32)
        self._allowed: dict[int, tuple[object, Tensor]] = {}  # req_index -> whose, [num_words]

    def sample(self, logits: Tensor, rows: Int32Array, noting: OutputLogprobs | None = None) -> Int32Array:
        """As ``Sampler.sample``."""
        return self.launch(logits, rows, noting).take()

    def launch(self, logits: Tensor, rows: Int32Array, noting: OutputLogprobs | None = None) -> LaunchedSampling:
        """As ``Sampler.sample``, without waiting for the outcome."""
        # The largest of absolute values: neither NaN nor an infinity is lost in it.
        is_finite = torch.linalg.vector_norm(logits, torch.inf, dim=-1).isfinite()
        if noting is not None:
            noting.note_raw(logits)
        columns = self._batch.sampling
        adjusted = columns.adjusted(rows.tolist())
        penalized = [(place, row) for place, row in adjusted if row in columns.penalties]
        if adjusted:
            self._adjust(logits, columns, adjusted, penalized)
        if noting is not None:
            noting.note_processed(logits)
        sampled = self._draw(logits, rows)
        if penalized:
            self._penalties.follow(penalized, sampled)
        return LaunchedSampling(sampled, is_finite, rows, self._batch.num_tokens[rows])

    def warm_up(self, logits: Tensor) -> None:
        """Launch every kernel once, so that none is compiled while somebody waits. ``logits`` are changed."""
        rows = np.arange(min(len(logits), len(self._batch.num_tokens)), dtype=np.int32)
        self._mask(logits, [0], to_device(np.full((1, self._num_words), -1, np.int32), self._device))
        self._penalties.warm_up(logits)
        self._draw(logits[: len(rows)], rows)
        self.latest.zero_()
        gather_logprobs(logits, self.latest.new_zeros(len(logits)))

    def _draw(self, logits: Tensor, rows: Int32Array) -> Tensor:
        columns, count = self._batch.sampling, len(rows)
        stride = -(-count // _ALIGNED) * _ALIGNED
        words = np.zeros((_WORDS_A_ROW, stride), np.int32)
        words[0, :count] = columns.temperature[rows].view(np.int32)
        words[1, :count] = columns.top_k[rows]
        words[2, :count] = columns.top_p[rows].view(np.int32)
        words[3, :count] = columns.min_p[rows].view(np.int32)
        keys = noise_keys(columns.noise_base[rows], self._batch.num_tokens[rows])
        words[4:6].reshape(-1)[: 2 * count] = keys.view(np.int32).reshape(-1)
        words[6, :count] = rows
        on_device = self._columns.put(words.reshape(-1)).view(_WORDS_A_ROW, stride)
        temperature, top_k, top_p, min_p = (on_device[index, :count] for index in range(4))
        sampled = torch.empty(count, dtype=torch.int32, device=self._device)
        sample(
            logits,
            temperature.view(torch.float32),
            top_k,
            top_p.view(torch.float32),
            min_p.view(torch.float32),
            on_device[4:6].view(-1)[: 2 * count].view(count, 2),
            sampled,
        )
        self.latest[on_device[6, :count].long()] = sampled
        return sampled

    def _adjust(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        adjusted: list[tuple[int, int]],
        penalized: list[tuple[int, int]],
    ) -> None:
        """Change the scores of some rows, (place, req_index), in place; in the order of ``sampler``."""
        self._add_bias(logits, columns, adjusted)
        bits = {place: self._allowed_bits(columns, row) for place, row in adjusted if row in columns.forbidden}
        if bits:
            self._mask(logits, list(bits), torch.stack(list(bits.values())))
        self._forbid(logits, columns, adjusted)
        if penalized:
            self._penalties.apply_(logits, columns, penalized, self._batch)
        masks = {place: columns.masks[row] for place, row in adjusted if row in columns.masks}
        if masks:
            self._mask(logits, list(masks), to_device(self._words_of(list(masks.values())), self._device))

    def _add_bias(self, logits: Tensor, columns: SamplingColumns, adjusted: list[tuple[int, int]]) -> None:
        asked = [(place, *columns.bias[row]) for place, row in adjusted if row in columns.bias]
        if not asked:
            return
        places = to_device(np.repeat([place for place, _, _ in asked], [len(ids) for _, ids, _ in asked]), self._device)
        ids = to_device(np.concatenate([ids for _, ids, _ in asked]), self._device)
        logits[places, ids] += to_device(np.concatenate([values for _, _, values in asked]), self._device)

    def _forbid(self, logits: Tensor, columns: SamplingColumns, adjusted: list[tuple[int, int]]) -> None:
        """Make ids impossible that would end a bad word, or end the output too early."""
        batch = self._batch
        places, forbidden = [], []
        for place, row in adjusted:
            num_tokens, num_prompt_tokens = int(batch.num_tokens[row]), int(batch.num_prompt_tokens[row])
            ids: list[int] = []
            if (bad_words := columns.bad_words.get(row)) is not None:
                output = batch.token_ids[row, num_prompt_tokens:num_tokens]
                ids += [word[-1] for word in bad_words if ends_with(output, word[:-1])]
            stop_ids = columns.stop_ids.get(row)
            if stop_ids is not None and num_tokens - num_prompt_tokens < columns.min_tokens[row]:
                ids += stop_ids.tolist()
            places += [place] * len(ids)
            forbidden += ids
        if forbidden:
            at = (to_device(np.array(places), self._device), to_device(np.array(forbidden), self._device))
            logits.index_put_(at, logits.new_full((), -torch.inf))

    def _mask(self, logits: Tensor, places: list[int], bits: Tensor) -> None:
        """Make ids impossible whose bit is 0 in the mask, [num_words], of a place."""
        apply_mask_(logits, to_device(np.array(places, np.int32), self._device), bits)

    def _allowed_bits(self, columns: SamplingColumns, row: int) -> Tensor:
        """Return the mask of a row's allowed ids, which stays the same as long as the row lives."""
        forbidden = columns.forbidden[row]
        whose, bits = self._allowed.get(row, (None, None))
        if bits is None or whose is not forbidden:
            words = self._words_of([np.packbits(~forbidden, bitorder="little")])
            bits = to_device(words, self._device)[0]
            self._allowed[row] = (forbidden, bits)
        return bits

    def _words_of(self, masks: list[Bits]) -> npt.NDArray[np.int32]:
        """Return [num_masks, num_words]; ids are in the order of the bits of little-endian words."""
        words = np.zeros((len(masks), 4 * self._num_words), np.uint8)
        for place, mask in enumerate(masks):
            words[place, : len(mask)] = mask
        return words.view(np.int32)
