"""Give out room for large messages: each in one piece, given back in the order in which it was taken. Pure."""

from __future__ import annotations

from collections import deque


class LargeArea:
    """A circle of bytes.

    ::

        0        tail           head        size
        |........|==============|...........|        taken: [tail, head)
        |========|..............|======|....|        taken: [tail, wrap) and [0, head)
                 head           tail   wrap
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[tuple[int, int, int]] = deque()  # position of the message, start, end

    def __len__(self) -> int:
        return len(self._taken)

    def place(self, length: int) -> int | None:
        """Return where ``length`` bytes would go now; None if there is no room. Takes nothing."""
        if not self._taken:
            return 0 if length <= self.size else None
        tail, head = self._taken[0][1], self._taken[-1][2]
        if head <= tail:  # wrapped; equal is full, since a message is never empty
            return head if length <= tail - head else None
        if length <= self.size - head:
            return head
        return 0 if length <= tail else None

    def take(self, position: int, start: int, length: int) -> None:
        """Take the bytes that ``place`` found, for the message at ``position``."""
        self._taken.append((position, start, start + length))

    @property
    def oldest(self) -> int | None:
        """The position of the oldest message that still lies here."""
        return self._taken[0][0] if self._taken else None

    def release_oldest(self) -> None:
        """Give back the room of the oldest message."""
        self._taken.popleft()
