"""``maniple worker``: the workers of this machine in the foreground. The flags are the worker service's own."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from control_plane.exit_codes import FAILURE


def run(argv: Sequence[str]) -> int:
    if importlib.util.find_spec("worker_service") is None:
        print("maniple worker: the worker is not installed here: pip install 'maniple[worker]'", file=sys.stderr)
        return FAILURE
    sys.stdout.flush()
    # In this process's place, so that signals and the exit code are the worker's.
    os.execv(sys.executable, [sys.executable, "-m", "worker_service", *argv])
