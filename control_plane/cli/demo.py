"""``maniple demo`` (hidden, used by ``make demo``): serve, ask one question, stream the answer, stop."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from control_plane.announcement import Ready
from control_plane.cli.announcements import display, from_json
from control_plane.cli.connection import report
from control_plane.cli.generate import stats_line
from control_plane.exit_codes import FAILURE, OK
from maniple_client import Chunk, Client, ManipleError
from service_chassis.command_parser import CommandParser

QUESTION = "What is the capital of France, and what is it known for?"
STOP_TIMEOUT_S = 20.0


def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="maniple demo", description=__doc__)
    made.add_argument("--model", default="demo")
    made.add_argument("--question", default=QUESTION)
    made.add_argument("--max-tokens", type=int, default=96)
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    # The same command that a person would type, in a process of its own; its announcements come back as JSON lines.
    command = [sys.executable, "-m", "control_plane.cli", "serve", "--model", arguments.model]
    command += ["--listen", "127.0.0.1:0", "--announce", "json", "--log-level", "warning"]
    began = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        ready = _wait_until_ready(server)
        if ready is None:
            code = server.wait()
            print(f"demo: the server ended with exit code {code} before it was ready", file=sys.stderr)
            return code or FAILURE
        print(f"Ready after {time.monotonic() - began:.1f} s.")
        answered = _ask(ready.address, arguments.question, arguments.max_tokens)
    finally:
        code = _stop(server)
    if answered != OK:
        return answered
    if code != OK:
        print(f"demo: the server ended with exit code {code}", file=sys.stderr)
        return code
    print("The server has stopped. `make serve` starts one that stays.")
    return OK


def _wait_until_ready(server: subprocess.Popen[str]) -> Ready | None:
    """Show the server's progress until it is ready. None: it ended before."""
    assert server.stdout is not None
    with display() as show:
        for line in server.stdout:
            announcement = from_json(line)
            if isinstance(announcement, Ready):
                return announcement  # not shown: it tells what to type next, and this server is about to go
            if announcement is not None:
                show(announcement)
    return None


def _ask(address: str, question: str, max_tokens: int) -> int:
    print(f"\n> {question}")
    with Client(address) as client:
        # Greedy, so that every run of the demo says the same.
        stream = client.generate(
            messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0.0, timeout_s=120
        )
        try:
            for event in stream:
                if isinstance(event, Chunk):
                    print(event.text, end="", flush=True)
        except ManipleError as error:
            print()
            return report("demo", error, address)
    done = stream.transcript.done
    print(f"\n\n{stats_line(done)}" if done else "\n")
    return OK if done else FAILURE


def _stop(server: subprocess.Popen[str]) -> int:
    """Ask the server to drain, and see to it that it is gone; return its exit code."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"demo: the server did not stop within {STOP_TIMEOUT_S:g} s and is killed", file=sys.stderr)
        server.kill()
        server.wait()
        return FAILURE
    finally:
        if server.stdout is not None:
            server.stdout.close()
