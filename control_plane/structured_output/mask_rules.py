"""What of a request a mask must say besides its grammar. One bit a token id, the lowest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from control_plane.generation import SamplingChoice

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRules:
    """The same for all samples of a request. Made by ``mask_rules``."""

    vocab_size: int
    eos_ids: tuple[int, ...]  # what ends the output where the grammar may end
    ignores_eos: bool  # only where nothing else may follow
    stop_ids: tuple[int, ...]  # eos and stop ids: not among the first `min_tokens`, unless nothing else may follow
    min_tokens: int
    vocabulary: Bits  # ids of the model that are no end of text
    kept: Bits | None  # ids that the request allows, where it says so

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's mask."""
        return 4 * -(-self.vocab_size // 32)

    def end_mask(self) -> bytes:
        """Return the mask of a row that is over, and samples on until its workers hear of it: nothing but its end."""
        return set_bits(np.zeros(self.row_bytes, np.uint8), self.eos_ids).tobytes()


def mask_rules(sampling: SamplingChoice, vocab_size: int) -> MaskRules:
    """Return the rules of a request that has a constraint."""
    row_bytes = 4 * -(-vocab_size // 32)
    inside = np.zeros(8 * row_bytes, np.bool_)
    inside[:vocab_size] = True
    vocabulary = clear_bits(np.packbits(inside, bitorder="little"), sampling.eos_ids)
    kept = None
    bad = [word[0] for word in sampling.bad_words if len(word) == 1]
    if sampling.allowed_token_ids or bad:
        kept = vocabulary.copy()
        if sampling.allowed_token_ids:
            kept &= set_bits(np.zeros(row_bytes, np.uint8), sampling.allowed_token_ids)
        clear_bits(kept, bad)
    return MaskRules(
        vocab_size=vocab_size,
        eos_ids=tuple(sorted(sampling.eos_ids)),
        ignores_eos=sampling.ignores_eos,
        stop_ids=tuple(sorted(sampling.eos_ids | sampling.stop_token_ids)),
        min_tokens=sampling.min_tokens,
        vocabulary=vocabulary,
        kept=kept,
    )


def clear_bits(bits: Bits, ids: Iterable[int]) -> Bits:
    """Clear some bits in place, and return them all."""
    for token_id in ids:
        bits[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
    return bits


def set_bits(bits: Bits, ids: Sequence[int]) -> Bits:
    """Set some bits in place, and return them all."""
    for token_id in ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bits
