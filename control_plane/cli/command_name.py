"""How to call this command again, as somebody can type it where they are."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_NAME = "maniple"


def command_name() -> str:
    """Return ``maniple`` where the shell finds it, else the path of this installation's own, such as .venv/bin/maniple.

    The path is relative to the working directory where it lies below it.
    """
    if shutil.which(_NAME):
        return _NAME
    path = Path(sys.argv[0]) if Path(sys.argv[0]).name == _NAME else Path(sys.executable).parent / _NAME
    path = path.absolute()  # links are kept: a venv is one
    if not path.is_file():  # not installed, but run from its sources
        return f"{_shown(Path(sys.executable))} -m control_plane.cli"
    return _shown(path)


def _shown(path: Path) -> str:
    here = Path.cwd()
    if path.parent == here:
        return f"./{path.name}"  # a bare name would be looked for on PATH
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
