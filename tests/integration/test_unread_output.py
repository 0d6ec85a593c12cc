"""A server whose output nobody reads: it serves on, and stops as it should."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from maniple_client import Client

COMMAND = [sys.executable, "-m", "control_plane.cli", "serve", "--model", "scripted", "--executor", "mp"]
LOUD = ["--announce", "json", "--log-level", "debug"]


def test_server_whose_output_nobody_reads_serves_on(tmp_path: Path) -> None:
    source, target = os.pipe()
    fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, 4096)
    address = f"unix:{tmp_path}/s"
    process = subprocess.Popen([*COMMAND, *LOUD, "--listen", address], stdout=target, stderr=target)
    try:
        with Client(address) as client:
            client.wait_until_ready(timeout_s=30)
            assert not select.select([], [target], [], 0)[1], "there is room still: nobody had to wait"
            for number in range(20):
                client.generate(token_ids=[1, 2, number], max_tokens=5, timeout_s=10).text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(source)
        os.close(target)
