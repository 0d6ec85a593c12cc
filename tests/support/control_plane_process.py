"""A control plane in a process of its own, for tests that stop or kill it. Talks in JSON lines.

Run as a program it forms a group of one worker process and runs a step every 20 ms until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def main() -> None:
    from control_plane.executors.multiproc import MultiprocExecutor
    from service_chassis.telemetry import configure_logging
    from support.faults import SETTINGS, SHORT_TIMES, WORKER, LiveGroup

    configure_logging("warning")
    live = LiveGroup(MultiprocExecutor(world_size=1, settings=WORKER), replace(SETTINGS, **SHORT_TIMES))
    await live.form()
    say(worker_pid=live.pid, directory=str(live.directory))
    stdin_closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not live.losses and not stdin_closed.done():
        await live.run_steps(1)
        live.assert_tokens_exact()
        say(step=live.row.step)
        await asyncio.sleep(0.02)
    if live.losses:
        say(lost=live.losses[0].reason)
    await live.group.teardown("asked to")
    say(ended=True)
    os._exit(0)  # the thread that reads standard input cannot be ended


class ControlPlaneProcess:
    """The other end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.control_plane_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.said: list[dict[str, Any]] = []
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self, key: str, *, timeout_s: float = 20.0) -> Any:
        """Return the next value that it says under ``key``."""
        deadline = time.monotonic() + timeout_s
        heard = len(self.said)
        while time.monotonic() < deadline:
            self._read()
            for facts in self.said[heard:]:
                heard += 1
                if key in facts:
                    return facts[key]
                assert "lost" not in facts, facts
            time.sleep(0.01)
        raise AssertionError(f"heard no {key} within {timeout_s} s")

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._rest += self._process.stdout.read() or b""
        *lines, self._rest = self._rest.split(b"\n")
        self.said += [json.loads(line) for line in lines]

    def finish(self) -> None:
        """Ask it to end, and see that it does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self.hear("ended")
        assert self._process.wait(10) == 0

    def close(self) -> None:
        """End it whatever it does."""
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    asyncio.run(main())
