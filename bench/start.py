"""How long from exec until a client has the first token, with the model in the cache?

`maniple serve` is started, a client waits for readiness and asks at once. "Warm" is the second start and all later
ones. "First time" is the first after an installation: no compiled kernels are there, since the cache directory is a new
one that only points at the model. (Python's own bytecode is there: installers write it.)

Examples:
  python bench/start.py
  python bench/start.py --runs 5 --first-time-runs 0
  python bench/start.py --model demo --flags="--dtype float32"

Ends with one JSON object of all times, and one line of JSON for each goal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from arguments import at_least_one
from control_plane.model_store import cache_directory, resolve_model
from goals import Figure, line_of, ours_at_most, short
from maniple_client import AsyncClient, Chunk, ManipleError
from processes import Started, Surroundings
from targets import free_ports, maniple


async def start_to_first_token(model: str, flags: list[str], cache: Path | None) -> dict[str, float]:
    """Start a server, ask once, stop it. Return the seconds to readiness and to the first token."""
    around = Surroundings("start-of-maniple-")
    address = f"127.0.0.1:{free_ports(1)}"
    words = maniple("serve", "--model", model, "--listen", address, "--log-level", "warning", *flags)
    environ = around.environ | ({"MANIPLE_CACHE": str(cache)} if cache else {})
    try:
        server = Started(words, environ, around.directory / "serve.log")
        try:
            async with AsyncClient(address) as client:
                await _ready(client, server)
                ready_s = time.monotonic() - server.started_at
                async with client.generate(token_ids=[1, 2, 3], max_tokens=1, temperature=0.0) as events:
                    async for event in events:
                        if isinstance(event, Chunk) and event.token_ids:
                            break
                first_token_s = time.monotonic() - server.started_at
        finally:
            await server.end()
    finally:
        around.kill_all()
        shutil.rmtree(around.directory, ignore_errors=True)
    return {"ready_s": ready_s, "first_token_s": first_token_s}


async def _ready(client: AsyncClient, server: Started, timeout_s: float = 180.0) -> None:
    end = time.monotonic() + timeout_s
    while True:
        with suppress(ManipleError):
            await client.wait_until_ready(timeout_s=0.0)
            return
        if server.exit_code() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start: {server.log_tail()}")
        server.read()  # so that its pipe does not fill
        await asyncio.sleep(0.01)


async def measure(model: str, flags: list[str], runs: int, first_time_runs: int) -> dict[str, Any]:
    """Return the times of both kinds."""
    result: dict[str, Any] = {"bench": "start", "model": model, "flags": flags}
    path = resolve_model(model, lambda *_: None).path  # fetched and converted before the clock runs
    for kind, count in (("first_time", first_time_runs), ("warm", runs)):
        times = []
        # One before the warm ones that does not count: what it compiles they find.
        for run in range(count + (kind == "warm" and count > 0)):
            with tempfile.TemporaryDirectory(prefix="start-of-maniple-cache-") as directory:
                cache = None
                if kind == "first_time":
                    cache = Path(directory)
                    (cache / "models").symlink_to(cache_directory() / "models")
                found = await start_to_first_token(model if model == "demo" else path, flags, cache)
            counts = kind == "first_time" or run > 0
            print(
                f"{kind} {'' if counts else '(not counted) '}: ready after {found['ready_s']:.2f} s, first token after"
                f" {found['first_token_s']:.2f} s",
                file=sys.stderr,
                flush=True,
            )
            if counts:
                times.append(found)
        result[f"{kind}_s"] = {
            "first_token": [round(found["first_token_s"], 3) for found in times],
            "ready": [round(found["ready_s"], 3) for found in times],
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench/start.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="what is served, default demo")
    parser.add_argument("--flags", default="", help="more flags of `maniple serve`, as one word")
    parser.add_argument("--runs", type=at_least_one, default=3, help="warm starts, default 3")
    parser.add_argument("--first-time-runs", type=int, default=1, help="first starts, default 1")
    arguments = parser.parse_args()
    flags = shlex.split(arguments.flags)
    result = asyncio.run(measure(arguments.model, flags, arguments.runs, arguments.first_time_runs))
    print(json.dumps(result))
    for name, bound_s in (("warm", 5.0), ("first time", 15.0)):
        figure = Figure(path="", suffix=name, unit="s", better="less", goal=ours_at_most(bound_s))
        if times := result[f"{name.replace(' ', '_')}_s"]["first_token"]:
            print(short(line_of("to the first token,", figure, [(one, None) for one in times], {})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
