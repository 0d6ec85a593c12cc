"""What a reader's process inherits."""

from __future__ import annotations

from typing import NamedTuple


class ReaderFds(NamedTuple):
    """Descriptors of one reader: for ``pass_fds`` of its process, and as text for a flag of its command line."""

    memory: int
    wake: int
    room: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> ReaderFds:
        """Read what ``str`` wrote. Raises ``ValueError``."""
        memory, wake, room = map(int, text.split(","))
        return cls(memory, wake, room)
