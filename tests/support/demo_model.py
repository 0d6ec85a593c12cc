"""The demo model's directory, fetched and converted once into the user's cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from control_plane.model_store import resolve_model


@cache
def demo_directory() -> Path:
    return Path(resolve_model("demo", lambda what, share, detail: None).path)
