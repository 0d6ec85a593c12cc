"""Start a server and stop it, again and again, half of the times by SIGKILL: does anything of it stay?"""

from __future__ import annotations

import signal
import sys
from typing import Any

from processes import Surroundings, until
from targets import Served, Streams

# After a kill the ranks see the end of a pipe and go, and the last one takes the directory along.
_SETTLE_S = 5.0


async def run_cycles(num_cycles: int, ranks: int) -> dict[str, Any]:
    """Run so many cycles of a scripted group under load; return what was left after each of them, and in the end."""
    around = Surroundings()
    wrong: list[str] = []
    most = dict.fromkeys(around.left(), 0)
    try:
        for cycle in range(num_cycles):
            target = Served(around, 'scripted:{"step_time_s": 0.005}', ranks)
            await target.start()
            streams = Streams(target, 256, 1000)
            try:
                await streams.all_run(2)
                number = signal.SIGKILL if cycle % 2 else signal.SIGTERM
                target.main.send_signal(number)
                if number is signal.SIGTERM:
                    target.main.send_signal(number)  # a second one ends it at once, with its streams
                await until(lambda target=target: target.main.exit_code() is not None, 15.0, "the end of the server")
                await streams.all_ended(5.0)
            finally:
                await streams.close()
                await target.close()
            try:
                await until(lambda: not any(around.left().values()), _SETTLE_S, "an empty machine", every_s=0.05)
            except TimeoutError:
                for kind, what in around.left().items():
                    most[kind] = max(most[kind], len(what))
                    wrong += [f"after cycle {cycle + 1} ({number.name}): {kind}: {one}" for one in what]
            print(f"cycle {cycle + 1}/{num_cycles}: {number.name}, {sum(most.values())} left at most", file=sys.stderr)
    except (TimeoutError, RuntimeError) as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        around.remove()
    figures = [
        {"name": f"{kind} left", "unit": "", "worst_s": count, "limit_s": 0, "values_s": []}
        for kind, count in most.items()
    ]
    return {"case": f"{num_cycles} cycles", "repetitions": num_cycles, "figures": figures, "wrong": wrong[:20]}
