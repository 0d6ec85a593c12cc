"""How much memory do the services take, and does it grow?

Sends short requests by the thousand to `maniple serve` and reads the resident memory of its processes all along; then
has many requests live at once and reads it again. What a rank takes beyond its weights and its KV cache is judged by
the peak of its process, start included.

Examples:
  python bench/memory.py
  python bench/memory.py --num-requests 2000 --num-live 100

Ends with one JSON object of all readings, and one line of JSON for each goal. Exit code 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from doors import make_door
from goals import Figure, line_of, ours_at_most, short
from load import Door, Length, make_prompts, run_closed
from processes import Started, Surroundings, children_of, title_of
from servers import wait_until_ready
from targets import free_ports, maniple

_MIB = 1 << 20
_NUM_BLOCKS = 512  # of KV: full after some hundred requests, so that what grows afterwards is not the prefix cache
_SHORT, _FEW = Length(16, 16), Length(4, 4)
_CONCURRENCY = 32
_PARTS = 10  # readings while the short requests run


def read_mib(pid: int, field: str) -> int:
    """Return a field of a process's status, such as VmRSS or VmHWM (the peak), in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError(f"the kernel does not tell {field} of process {pid}")


async def send(door: Door, count: int, lengths: tuple[Length, Length], at_once: int, vocab_size: int, seed: int) -> int:
    """Send requests; return how many failed."""
    outcomes = await run_closed(door, make_prompts(count, *lengths, vocab_size, seed, None), at_once)
    return sum(1 for outcome in outcomes if outcome.error)


async def watch(server: Started, address: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Send everything to a server and return what its processes took."""
    async with make_door("maniple", address, "", 0) as door:
        vocab_size = await wait_until_ready(door, server.exit_code, 180.0)
        rank = next(pid for pid in children_of(server.pid) if "worker_service" in title_of(pid))
        readings, failed = [(read_mib(server.pid, "VmRSS"), read_mib(rank, "VmRSS"))], 0
        for part in range(_PARTS):
            count = arguments.num_requests // _PARTS
            failed += await send(door, count, (_SHORT, _FEW), _CONCURRENCY, vocab_size, part)
            readings.append((read_mib(server.pid, "VmRSS"), read_mib(rank, "VmRSS")))
            print(
                f"after {count * (part + 1)}: control plane {readings[-1][0]} MiB, rank {readings[-1][1]} MiB",
                file=sys.stderr,
                flush=True,
            )
        live = asyncio.create_task(
            send(door, arguments.num_live, (Length(64, 64), _SHORT), arguments.num_live, vocab_size, _PARTS)
        )
        most = 0
        while not live.done():
            most = max(most, read_mib(server.pid, "VmRSS"))
            await asyncio.wait([live], timeout=0.05)
        peak = read_mib(rank, "VmHWM")
    kept = sum(_logged_mib(server, event, key) for event, key in _KEPT)
    settled = readings[2]  # by then caches and pools are full
    return {
        "bench": "memory",
        "readings_mib": {"control_plane": [one for one, _ in readings], "rank": [one for _, one in readings]},
        "rank_peak_mib": peak,
        "rank_weights_and_kv_mib": kept,
        "control_plane_live_mib": most,
        "num_failed": failed + live.result(),
        "rank_beyond_mib": peak - kept,
        "control_plane_growth_mib": readings[-1][0] - settled[0],
        "rank_growth_mib": readings[-1][1] - settled[1],
    }


_KEPT = (("memory.profiled", "weights_gib"), ("kv_cache.allocated", "kv_bytes"))


def _logged_mib(server: Started, event: str, key: str) -> int:
    value = server.logged(event)[-1][key]
    return int(value * 1024 if key.endswith("_gib") else value // _MIB)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    around = Surroundings("memory-of-maniple-")
    address = f"127.0.0.1:{free_ports(1)}"
    words = maniple(
        "serve", "--model", arguments.model, "--listen", address, "--num-kv-blocks", str(_NUM_BLOCKS), "--announce=json"
    )
    try:
        server = Started(words, around.environ, around.directory / "serve.log")
        try:
            return await watch(server, address, arguments)
        finally:
            await server.end()
    finally:
        around.kill_all()
        shutil.rmtree(around.directory, ignore_errors=True)


_GOALS = (
    ("of a rank beyond weights and KV, at its peak", "rank_beyond_mib", 600.0),
    ("a rank's growth", "rank_growth_mib", 8.0),
    ("the control plane's growth", "control_plane_growth_mib", 8.0),
    ("of a control plane with many live requests", "control_plane_live_mib", 150.0),
)


def main() -> int:
    made = argparse.ArgumentParser(
        prog="bench/memory.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="demo", help="what is served, default demo")
    made.add_argument("--num-requests", type=int, default=20_000, help="of 16 tokens that ask for 4, default 20000")
    made.add_argument("--num-live", type=int, default=1000, help="requests at once afterwards, default 1000")
    result = asyncio.run(measure(made.parse_args()))
    print(json.dumps(result))
    for name, path, bound_mib in _GOALS:
        figure = Figure(path=path, suffix=name, unit="MiB", better="less", goal=ours_at_most(bound_mib))
        print(short(line_of("memory", figure, [(figure.of(result), None)], {})))
    return 1 if result["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
