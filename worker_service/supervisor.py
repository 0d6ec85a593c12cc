"""Run the ranks of one container: a process each, one port each, and none without the others.

A group stands or falls as one, and the orchestrator sees one container: when any rank ends, the others are ended at
once and this process exits, so that all of it is started anew. The supervisor touches no device and loads no torch;
its children are new programs, never forks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import signal
from collections.abc import Mapping
from typing import Any

from service_chassis.child_process import ChildProcess
from service_chassis.telemetry import get_logger
from worker_service.config import WorkerConfig, command_line, next_address

# A rank that is told to go is gone within a second, also when its device hangs; what is left then is killed.
_GRACE_S = 2.0
_RANK_ENDED = 1

log = get_logger()


def rank_config(config: WorkerConfig, index: int) -> WorkerConfig:
    """Return the configuration of the rank with place ``index`` here."""
    return dataclasses.replace(
        config,
        tensor_parallel_size=1,
        rank=config.rank + index,
        is_all_here=config.tensor_parallel_size == config.world_size,
        device_ids=config.device_ids[index : index + 1],
        listen=next_address(config.listen, index),
        health_listen=next_address(config.health_listen, index),
        probe_listen=next_address(config.probe_listen, index),
        metrics_listen=next_address(config.metrics_listen, index),
    )


async def supervise(config: WorkerConfig) -> int:
    """Run ``config.tensor_parallel_size`` ranks until one of them ends or a signal comes. Returns the exit code.

    0 after a signal that all ranks obeyed. A rank that ended gives its own code, 128 and more for a signal as in a
    shell, and never 0: the container did not do what it is for.
    """
    ends: asyncio.Queue[int | signal.Signals] = asyncio.Queue()  # ranks that ended, signals that came
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends.put_nowait, number)
    watched_fd, lifeline_fd = os.pipe()  # closes when this process ends, however it ends
    children: dict[int, ChildProcess] = {}
    try:
        for index in range(config.tensor_parallel_size):
            one = rank_config(config, index)
            children[one.rank] = await ChildProcess.start(
                ["-m", "worker_service", *command_line(one), "--parent-fd", str(watched_fd)],
                pass_fds=(watched_fd,),
                on_exit=functools.partial(_on_exit, ends, one.rank),
                prefix=f"[rank {one.rank}] ",
            )
            log.info("rank.started", rank=one.rank, pid=children[one.rank].pid, address=one.listen)
        first = await ends.get()
        if isinstance(first, signal.Signals):
            log.info("worker.stopping", reason=first.name)
        await _end(children, ends)
    finally:
        os.close(watched_fd)
        os.close(lifeline_fd)
    return _exit_code(first, children)


def _on_exit(ends: asyncio.Queue[int | signal.Signals], rank: int, cause: str, log_tail: tuple[str, ...]) -> None:
    tell = log.info if cause == "exit code 0" else log.warning  # in good order: its owner or the operator wanted it
    tell("rank.ended", rank=rank, reason=cause)
    ends.put_nowait(rank)


async def _end(children: Mapping[int, ChildProcess], ends: asyncio.Queue[int | signal.Signals]) -> None:
    """End all that still run; a second signal ends them without grace."""
    ending: asyncio.Future[Any] = asyncio.gather(*(child.end(grace_s=_GRACE_S) for child in children.values()))
    while not ending.done():
        came: asyncio.Future[Any] = asyncio.ensure_future(ends.get())
        await asyncio.wait({ending, came}, return_when=asyncio.FIRST_COMPLETED)
        if not came.done():
            came.cancel()
        elif isinstance(came.result(), signal.Signals):
            for child in children.values():
                child.signal(signal.SIGKILL)


def _exit_code(first: int | signal.Signals, children: Mapping[int, ChildProcess]) -> int:
    if isinstance(first, signal.Signals):
        return 0 if all(child.exit_code == 0 for child in children.values()) else _RANK_ENDED
    code = children[first].exit_code or _RANK_ENDED
    return code if code > 0 else 128 - code
