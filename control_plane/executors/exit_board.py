"""Tell whoever asks that a rank's process ended; late askers too."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.executors.base import RankExit


class ExitBoard:
    """Exits of one executor. What watches the processes holds this, and not the executor."""

    def __init__(self) -> None:
        self._exits: list[RankExit] = []
        self._callbacks: list[Callable[[RankExit], None]] = []
        self._silenced = False

    def subscribe(self, callback: Callable[[RankExit], None]) -> None:
        """Call back for every exit, those before included."""
        self._callbacks.append(callback)
        for end in list(self._exits):
            callback(end)

    def post(self, end: RankExit) -> None:
        """Report one exit, unless it is wanted."""
        if self._silenced:
            return
        self._exits.append(end)
        for callback in list(self._callbacks):
            callback(end)

    def silence(self) -> None:
        """Report nothing more: from now on processes end because we want it."""
        self._silenced = True
