"""Wait for the same call on all ranks: replies in rank order, the first failure wins, a hang is named."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from service_chassis.ids import Rank
from service_chassis.telemetry import get_logger

log = get_logger()

T = TypeVar("T")


class RankCallError(Exception):
    """A rank failed a call, or did not answer in time. The first failure on any rank, and which."""

    def __init__(self, rank: Rank, method: str, cause: str, *, error: BaseException | None = None) -> None:
        super().__init__(f"rank {rank}: {method}: {cause}")
        self.rank = rank
        self.method = method
        self.cause = cause
        self.error = error  # a ManipleError where the rank said which


def start_on_all(
    method: str,
    calls: Mapping[Rank, Coroutine[Any, Any, T]],
    *,
    timeout_s: float,
    reply_ranks: Sequence[Rank] | None = None,
) -> asyncio.Task[list[T]]:
    """Start every call now; the task returned ends as ``Executor.collective_rpc`` says."""
    tasks = {rank: asyncio.ensure_future(call) for rank, call in sorted(calls.items())}
    named = sorted(calls if reply_ranks is None else reply_ranks)
    return asyncio.ensure_future(_collect(method, tasks, named, timeout_s))


async def _collect(
    method: str, tasks: Mapping[Rank, asyncio.Future[T]], named: Sequence[Rank], timeout_s: float
) -> list[T]:
    deadline = asyncio.get_running_loop().time() + timeout_s
    pending = set(tasks.values())
    try:
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            done, pending = await asyncio.wait(pending, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED)
            for rank, task in tasks.items():
                if task in done:
                    _raise_failure(rank, method, task, timeout_s)
            if all(tasks[rank].done() for rank in named):
                break
            if not done:
                raise _late(method, tasks, timeout_s)
    except BaseException:
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)  # also those that failed in the same moment
        raise
    for rank, task in tasks.items():
        if task in pending:  # a rank that was not named and still works; it has the same hang guard
            task.add_done_callback(functools.partial(_log_late_failure, rank, method))
    return [tasks[rank].result() for rank in named]


def _raise_failure(rank: Rank, method: str, task: asyncio.Future[T], timeout_s: float) -> None:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return
    if isinstance(error, TimeoutError):
        cause = f"no answer within {timeout_s:g} s"
    else:
        cause = str(error) or type(error).__name__
    raise RankCallError(rank, method, cause, error=error) from error


def _late(method: str, tasks: Mapping[Rank, asyncio.Future[T]], timeout_s: float) -> RankCallError:
    first, *others = [rank for rank, task in tasks.items() if not task.done()]
    also = f" (nor from rank {', '.join(map(str, others))})" if others else ""
    return RankCallError(first, method, f"no answer within {timeout_s:g} s{also}", error=TimeoutError())


def _log_late_failure(rank: Rank, method: str, task: asyncio.Future[T]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.warning("rank_call.failed_late", rank=rank, method=method, reason=str(error))
