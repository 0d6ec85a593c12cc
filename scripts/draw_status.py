"""Draw docs/images/status.svg: `maniple status --watch` of a real server with two ranks under load.

python scripts/draw_status.py
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from rich.console import Console

from control_plane.cli.status import rows, table
from maniple_client import Client

IMAGE = Path(__file__).resolve().parents[1] / "docs/images/status.svg"
SERVE = ["-m", "control_plane.cli", "serve", "--announce", "json", "--log-level", "error", "--executor", "mp"]
MODEL = 'scripted:{"step_time_s": 0.02}'
NUM_CLIENTS = 12
LOAD_S = 12.0


def main() -> None:
    """Serve, put load on it, and draw what is seen then."""
    words = ["--model", MODEL, "--served-model-name", "demo", "--tensor-parallel-size", "2", "--listen", "127.0.0.1:0"]
    command = [sys.executable, *SERVE, *words, "--max-num-seqs", "8", "--num-kv-blocks", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            draw(_address(server))
        finally:
            server.terminate()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if address := json.loads(line).get("address"):
            return str(address)
    raise SystemExit("the server did not come up")


def draw(address: str) -> None:
    """Look at a server that is busy, as `maniple status --watch` does."""
    over = threading.Event()

    def ask(number: int) -> None:
        with Client(address) as client:
            while not over.is_set():
                prompt = f"Client {number % 3} asks for a long story about a Roman unit that moves in ranks."
                for _ in client.generate(prompt, max_tokens=150, ignore_eos=True):
                    pass

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_CLIENTS)]
    for one in clients:
        one.start()
    time.sleep(LOAD_S)
    with Client(address) as client:
        console = Console(record=True, width=118, file=io.StringIO())
        console.print(table(rows(client.status(), address)))
    over.set()
    for one in clients:
        one.join()
    drawn = console.export_svg(title="maniple status --watch")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # whoever looks has a font of his own
    IMAGE.parent.mkdir(exist_ok=True)
    IMAGE.write_text("\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n")


if __name__ == "__main__":
    main()
