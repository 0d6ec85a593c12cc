"""Go through a grammar with one sample, token by token, and say what it may sample next.

Everything here is called from one thread, which is not the event loop's: some grammars take their time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher

from control_plane.structured_output.mask_rules import Bits, MaskRules, clear_bits, set_bits

# What a request may take of the processor that all share: a grammar that takes longer delays everybody's next token.
# Ordinary ones take a tenth of a millisecond for a token.
BURST_S = 0.5
PER_TOKEN_S = 0.002
# A batch that took longer than this is looked at one by one the next time, to see whose time it was.
_SLOW_S = 0.02


@dataclass(slots=True, eq=False)
class Walk:
    """One sample in its grammar.

    Attributes:
        mask: what it may sample next, as it travels; None while that is not known.
        fault: why it cannot go on, as a phrase.
        spent_s: processor time that was seen to be spent on it alone.
    """

    matcher: LLMatcher
    num_words: int  # of 4 bytes, of the library's own masks
    rules: MaskRules
    num_output_tokens: int = 0
    mask: bytes | None = None
    fault: str = ""
    spent_s: float = 0.0

    def consume(self, token_id: int) -> None:
        """Go on by one token."""
        self.mask = None
        self.num_output_tokens += 1
        if not self.fault and not self.matcher.consume_token(token_id):
            # It was chosen among those that the mask allowed: so none of them was left by what else was asked for.
            self.fault = self._limit_met() or "and the request's other parameters leave no token to sample"

    def take_mask(self, row: Bits) -> None:
        """Take what the library computed of the next token, and settle what else there is to say."""
        if self.matcher.is_error():
            self.fault = self._limit_met() or "cannot be followed any further"
            return
        rules = self.rules
        text = np.zeros(rules.row_bytes, np.uint8)  # what goes on with the text; the end is decided here
        text[: len(row)] = row[: rules.row_bytes]
        text &= rules.vocabulary
        may_end = self.matcher.is_accepting()
        if rules.kept is not None:
            text &= rules.kept
        mask = text.copy()
        if may_end and not rules.ignores_eos:
            set_bits(mask, rules.eos_ids)
        if self.num_output_tokens < rules.min_tokens:
            clear_bits(mask, rules.stop_ids)
        # A grammar that leaves no choice is followed, whatever else was asked for.
        if not mask.any():
            mask = text if text.any() or not may_end else set_bits(mask, rules.eos_ids)
        if mask.any():
            self.mask = mask.tobytes()
        else:
            self.fault = "and the request's other parameters leave no token to sample"

    def charge(self, seconds: float) -> None:
        """Count time that was spent on this walk alone."""
        self.spent_s += seconds
        if self.spent_s > BURST_S + PER_TOKEN_S * self.num_output_tokens:
            self.fault = f"takes too long: {self.spent_s:.1f} s for {self.num_output_tokens} tokens"

    def _limit_met(self) -> str:
        """Say which of the library's limits was met, if one was."""
        error = self.matcher.get_error() if self.matcher.is_error() else ""
        met = any(sign in error.lower() for sign in ("too many", "max is", "fuel", "limit"))
        return f"is too complex: {error.splitlines()[0]}" if met else ""


class Pace:
    """Moves many walks on at once."""

    def __init__(self) -> None:
        self._executor = LLExecutor(num_threads=max(1, min(4, (os.cpu_count() or 1) // 4)))
        self._one_by_one = False

    def advance(self, steps: Sequence[tuple[Walk, Sequence[int]]]) -> None:
        """Go on with each walk by its tokens, if there are any, and compute what may come next."""
        started = time.perf_counter()
        if self._one_by_one or len(steps) == 1:
            for step in steps:
                before = time.thread_time()  # and not the time that others took of the processor
                self._advance([step])
                step[0].charge(time.thread_time() - before)
        else:
            self._advance(steps)
        self._one_by_one = len(steps) > 1 and time.perf_counter() - started > _SLOW_S

    def _advance(self, steps: Sequence[tuple[Walk, Sequence[int]]]) -> None:
        for walk, token_ids in steps:
            for token_id in token_ids:
                walk.consume(token_id)
        walks = [walk for walk, _ in steps if not walk.fault]
        if not walks:
            return
        masks = np.zeros((len(walks), walks[0].num_words), np.int32)  # one model has one vocabulary
        if len(walks) == 1:
            llguidance.numpy.fill_next_token_bitmask(walks[0].matcher, masks)
        else:
            pairs = [(walk.matcher, place) for place, walk in enumerate(walks)]
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, pairs, masks)
        for walk, row in zip(walks, masks.astype("<i4", copy=False).view(np.uint8), strict=True):
            walk.take_mask(row)
