"""Wait for a condition with a deadline, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str, *, timeout_s: float = 10.0) -> None:
    """Return when ``condition()`` is true; fail with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for: {what}"
        await asyncio.sleep(0.005)
