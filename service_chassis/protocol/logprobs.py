"""Log-probabilities of consecutive tokens of one row, in columns, and as ``TokenLogprobs`` of sampling.proto.

A position takes eight bytes an entry. Requests keep theirs until they are forgotten, on both sides of the wire: as
Python numbers the same would take ten times as much.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from maniple.v1.sampling_pb2 import TokenLogprobs

_BYTES_PER_ENTRY = 8
_BYTES_PER_POSITION = 4


class Logprobs:
    """One position a token: what it and the likeliest were given, and its rank.

    A position of rank 0 says nothing: nothing precedes the token, or what was known of it is lost.
    """

    __slots__ = ("ranks", "token_ids", "values", "width")

    def __init__(
        self, width: int, token_ids: bytes = b"", values: bytes = b"", ranks: bytes = b"", *, num_unknown: int = 0
    ) -> None:
        """Take over native columns, behind ``num_unknown`` positions that say nothing.

        Args:
            width: entries of a position: the token itself, then the likeliest.
            token_ids: [num_positions, width] uint32.
            values: [num_positions, width] float32.
            ranks: [num_positions] uint32; 1 is the likeliest.
            num_unknown: positions in front.
        """
        self.width = width
        self.token_ids = array("I", bytes(4 * width * num_unknown) + token_ids)
        self.values = array("f", bytes(4 * width * num_unknown) + values)
        self.ranks = array("I", bytes(4 * num_unknown) + ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Logprobs):
            return NotImplemented
        return self.width == other.width and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"Logprobs(width={self.width}, {len(self)} positions)"

    @property
    def num_bytes(self) -> int:
        """Memory of the columns."""
        return self.size_of(len(self), self.width)

    def extend(self, other: Logprobs) -> None:
        """Add positions behind the last; of one width."""
        assert other.width == self.width
        self.token_ids += other.token_ids
        self.values += other.values
        self.ranks += other.ranks

    def part(self, start: int, stop: int | None = None) -> Logprobs:
        """Return a copy of positions [start, stop)."""
        part = Logprobs(self.width)
        stop = len(self) if stop is None else min(stop, len(self))
        part.token_ids = self.token_ids[start * self.width : stop * self.width]
        part.values = self.values[start * self.width : stop * self.width]
        part.ranks = self.ranks[start:stop]
        return part

    def pieces(self, max_entries: int) -> Iterator[Logprobs]:
        """Yield copies of at most so many entries, at least one position each; nothing of nothing."""
        step = max(1, max_entries // self.width)
        for start in range(0, len(self), step):
            yield self.part(start, start + step)

    def to_bytes(self) -> bytes:
        """Return the columns one behind the other, for ``from_bytes`` on the same kind of machine."""
        return self.token_ids.tobytes() + self.values.tobytes() + self.ranks.tobytes()

    @staticmethod
    def size_of(num_positions: int, width: int) -> int:
        """Return the bytes of ``to_bytes``."""
        return num_positions * (_BYTES_PER_ENTRY * width + _BYTES_PER_POSITION)

    @classmethod
    def from_bytes(cls, raw: bytes, width: int) -> Logprobs:
        """Return what ``to_bytes`` wrote, of that width."""
        num_positions = len(raw) // cls.size_of(1, width)
        first, second = 4 * width * num_positions, 8 * width * num_positions
        return cls(width, raw[:first], raw[first:second], raw[second:])

    def to_message(self) -> TokenLogprobs:
        """Return the positions as they are sent."""
        message = TokenLogprobs()
        width = self.width
        for index, rank in enumerate(self.ranks):
            start = index * width
            if rank:
                message.positions.add(
                    token_ids=self.token_ids[start : start + width],
                    logprobs=self.values[start : start + width],
                    rank=rank,
                )
            else:
                message.positions.add()
        return message

    @classmethod
    def from_message(cls, message: TokenLogprobs, width: int = 0) -> Logprobs:
        """Read what was sent. Raises ``ValueError`` for a position of another width; 0 takes that of the first."""
        width = width or max((len(position.token_ids) for position in message.positions), default=1) or 1
        columns = cls(width)
        for position in message.positions:
            if not position.rank and not position.token_ids and not position.logprobs:
                columns.extend(cls(width, num_unknown=1))
                continue
            if not position.rank or len(position.token_ids) != width or len(position.logprobs) != width:
                raise ValueError(f"a position has {len(position.token_ids)} ids, {width} are due")
            columns.token_ids.extend(position.token_ids)
            columns.values.extend(position.logprobs)
            columns.ranks.append(position.rank)
        return columns
