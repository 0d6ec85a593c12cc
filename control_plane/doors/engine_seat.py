"""Let doors stand open while there is no engine yet, or none any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from service_chassis.errors import NotReady

if TYPE_CHECKING:
    from control_plane.engine import Engine


class EngineSeat:
    """Holds the present engine. A group that is formed anew brings a new one; doors ask here at every call."""

    def __init__(self, reason: str = "the model is being loaded") -> None:
        """Begin empty; ``reason`` is what clients are told."""
        self._engine: Engine | None = None
        self._reason = reason
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def engine(self) -> Engine:
        """Return the engine. Raises ``NotReady`` where there is none."""
        if self._engine is None:
            raise NotReady(f"not accepting requests: {self._reason}")
        return self._engine

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self._engine is not None and self._engine.ready

    @property
    def not_ready_reason(self) -> str:
        """Why not, or nothing."""
        return self._reason if self._engine is None else self._engine.not_ready_reason

    def take(self, engine: Engine) -> None:
        """Seat an engine; readiness is its own from now on."""
        self._engine = engine
        engine.on_readiness(lambda _: self._tell(engine))

    def leave(self, reason: str) -> None:
        """Empty the seat, saying why."""
        self._engine, self._reason = None, reason
        self._tell(None)

    def report(self, reason: str) -> None:
        """Say what is being waited for while the seat is empty."""
        self._reason = reason

    def on_readiness(self, callback: Callable[[bool], None]) -> None:
        """Call back with ``ready`` now and whenever it may have changed."""
        self._listeners.append(callback)
        callback(self.ready)

    def _tell(self, engine: Engine | None) -> None:
        if engine is not self._engine:
            return  # an engine of before
        for callback in self._listeners:
            callback(self.ready)
