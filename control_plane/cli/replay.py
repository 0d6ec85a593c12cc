"""``maniple replay``: check a recorded log of deltas offline. The work is the worker service's own batch state."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from control_plane.exit_codes import FAILURE


def run(argv: Sequence[str]) -> int:
    if importlib.util.find_spec("worker_service") is None:
        print("maniple replay: the worker is not installed here: pip install 'maniple[worker]'", file=sys.stderr)
        return FAILURE
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "worker_service.replay", *argv]).returncode
