"""Fingerprint a batch state (PROTOCOL B7), so that a diverged rank is seen before it launches a step.

``state_digest = sum over rows of c * n + sum over its blocks of h(c, kv_group, index, block)``, modulo 2**64,
with ``c = mix(row_key) | 1``, ``h = mix(c ^ mix(kv_group << 58 | index << 32 | block))`` and n the computed tokens of
the row, those scheduled by the delta included. Linear in n, so that a steady step of any number of decodes adds one
kept number.

``token_digest = sum over known tokens of mix(c ^ mix(position << 32 | id))``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

MASK64 = (1 << 64) - 1
# From so many blocks at once on numpy is quicker: a long prompt, a row that is taken over.
_MANY_BLOCKS = 16


def mix(x: int) -> int:
    """Return the splitmix64 finaliser of ``x``, modulo 2**64. Source: Steele, Lea, Flood 2014."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK64
    return x ^ x >> 31


def row_factor(row_key: int) -> int:
    """Return c, the odd factor by which every contribution of a row is marked."""
    return mix(row_key) | 1


def block_term(c: int, kv_group: int, index: int, block_id: int) -> int:
    """Return the contribution of ``block_id`` at place ``index`` of a row's table."""
    return mix(c ^ mix(kv_group << 58 | index << 32 | block_id))


def token_term(c: int, position: int, token_id: int) -> int:
    """Return the contribution of one known token to the token digest."""
    return mix(c ^ mix(position << 32 | token_id))


class _Row:
    __slots__ = ("advance", "c", "terms")

    def __init__(self, c: int) -> None:
        self.c = c
        # By kv_group, the terms of the blocks in the order of the table; 0 where none was put. Numbers and no objects:
        # what a row keeps of a block is looked at again by nobody, the garbage collector included.
        self.terms: dict[int, array[int]] = {}
        self.advance = 0  # tokens it advances by when not mentioned

    def put(self, kv_group: int, first_index: int, terms: Sequence[int]) -> int:
        """Keep terms of blocks at consecutive places; return by how much their sum grew."""
        kept = self.terms.get(kv_group)
        if kept is None:
            kept = self.terms[kv_group] = array("Q")
        if len(kept) < first_index:
            kept.extend([0] * (first_index - len(kept)))
        replaced = kept[first_index : first_index + len(terms)]
        kept[first_index : first_index + len(terms)] = array("Q", terms)
        return sum(terms) - sum(replaced)


class StateDigest:
    """Keep the state digest of a batch up to date in work proportional to what changes.

    Used by both ends: the control plane from its plans, a worker from the deltas it reads. It knows nothing of row
    states; the caller says what a row advances by when it is not mentioned.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}  # req_index -> row
        self._digest = 0
        self._steady = 0  # sum of c * advance over rows: what one step of nothing but unmentioned rows adds

    @property
    def value(self) -> int:
        """The digest, below 2**64."""
        return self._digest & MASK64

    def __contains__(self, req_index: int) -> bool:
        return req_index in self._rows

    def add(self, req_index: int, row_key: int) -> None:
        """Enter a row with no blocks and no computed tokens."""
        assert req_index not in self._rows
        self._rows[req_index] = _Row(row_factor(row_key))

    def remove(self, req_index: int, num_computed_tokens: int) -> None:
        """Take a row out. ``num_computed_tokens`` is its true count, unmentioned advances included."""
        self.clear(req_index, num_computed_tokens)
        del self._rows[req_index]

    def clear(self, req_index: int, num_computed_tokens: int) -> None:
        """Take a row's tokens and blocks out; it stays, and does not advance any more (preemption)."""
        row = self._rows[req_index]
        self.set_advance(req_index, 0)
        self._digest -= row.c * num_computed_tokens + sum(map(sum, row.terms.values()))
        row.terms.clear()

    def compute(self, req_index: int, num_tokens: int) -> None:
        """Count ``num_tokens`` more computed tokens of a row (negative: take back)."""
        self._digest += self._rows[req_index].c * num_tokens

    def set_advance(self, req_index: int, num_tokens: int) -> None:
        """Say by how many tokens the row advances in a step that does not mention it."""
        row = self._rows[req_index]
        if row.advance != num_tokens:
            self._steady += row.c * (num_tokens - row.advance)
            row.advance = num_tokens

    def put_blocks(self, req_index: int, kv_group: int, first_index: int, block_ids: Iterable[int]) -> None:
        """Put blocks at consecutive places of a row's table, from ``first_index`` on."""
        row = self._rows[req_index]
        ids = list(block_ids)
        if len(ids) == 1:  # a row that decodes gets one at a time
            term, kept = block_term(row.c, kv_group, first_index, ids[0]), row.terms.get(kv_group)
            if kept is not None and len(kept) == first_index:
                kept.append(term)
                self._digest += term
                return
            terms = [term]
        elif len(ids) < _MANY_BLOCKS:
            terms = [block_term(row.c, kv_group, index, block_id) for index, block_id in enumerate(ids, first_index)]
        else:
            from service_chassis.protocol.arrays import block_terms  # which is written in terms of this module

            terms = block_terms(row.c, kv_group, first_index, ids)
        self._digest += row.put(kv_group, first_index, terms)

    def advance_unmentioned(self) -> None:
        """Count one step of every row's standing advance; undo it with ``compute`` for rows that were mentioned."""
        self._digest += self._steady
