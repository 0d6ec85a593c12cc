"""Signals that come when everything has been stopped already."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal, sys
from control_plane.stop_signals import StopSignals

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

async def main(second):
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.stop.wait()
        if second == "within":
            os.kill(os.getpid(), signal.SIGINT)
            await signals.hurry.wait()
        signals.exit_code = 3
    if second == "after":
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    if second == "last":
        sys.modules["late"] = Late()  # goes when the interpreter has given up its handlers
    return 3

sys.exit(asyncio.run(main(sys.argv[1])))
"""


@pytest.mark.parametrize("second", ["never", "within", "after", "last"])
def test_second_signal_changes_no_exit_code_however_late_it_comes(second: str) -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM, second], timeout=50).returncode == 3
