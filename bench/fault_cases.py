"""The faults, each done to a server with eight running streams: what is measured, and what it may take at most."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from math import inf

from processes import Surroundings, is_alive, tree, until, until_gone
from service_chassis.scripted import ScriptedOptions, fail_at, parse_scripted, scripted_model
from targets import Elsewhere, Served, StreamLog, Streams, Target, Vllm, ready

# What takes so long is a hang, whatever the limit.
HANG_S = 60.0
_MAX_TOKENS = 2000
# Long enough that everybody runs, and that steps are steady.
_TOKENS_BEFORE = 8
_FAULT_STEP = 60


@dataclass(frozen=True)
class Settings:
    """What the cases run on."""

    model: str
    ranks: int
    vocab_size: int
    heartbeat_timeout_s: float
    step_timeout_s: float
    lease_s: float
    peer: str = ""  # a command that starts vLLM

    @property
    def flags(self) -> tuple[str, ...]:
        """The times, as flags."""
        return (
            *("--heartbeat-timeout-s", f"{self.heartbeat_timeout_s:g}", "--step-timeout-s", f"{self.step_timeout_s:g}"),
            *("--lease-s", f"{self.lease_s:g}"),
        )

    def scripted(self, kind: str) -> str:
        """Return a scripted model in which rank 1 fails; it stands in where a real model cannot be told to."""
        options = parse_scripted(self.model) or ScriptedOptions(step_time_s=0.02)
        fault = fail_at(min(1, self.ranks - 1), _FAULT_STEP, kind)  # type: ignore[arg-type]
        values = {name: getattr(options, name) for name in ("step_time_s", "max_position")}
        return scripted_model(ScriptedOptions(**values, faults=(fault,)))


@dataclass
class Measured:
    """Seconds by name, and what went otherwise than it must."""

    seconds: dict[str, float] = field(default_factory=dict)  # infinite: it was given up after HANG_S
    wrong: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # what each client was told in the end

    def must(self, condition: object, sentence: str) -> None:
        if not condition:
            self.wrong.append(sentence)


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    run: Callable[[Surroundings, Settings, int], Awaitable[Measured]]
    limits: Callable[[Settings], dict[str, float]]  # seconds, by the names that ``run`` measures
    for_peer: bool = False


@asynccontextmanager
async def running(
    target: Target, settings: Settings, max_tokens: int = _MAX_TOKENS, *, num_tokens: int = _TOKENS_BEFORE
) -> AsyncIterator[tuple[Streams, list[int]]]:
    """Start a target and its streams; yield them and the pids of the ranks once every stream has tokens."""
    await target.start()
    streams = Streams(target, settings.vocab_size, max_tokens)
    try:
        await streams.all_run(num_tokens)
        yield streams, await target.rank_pids()
    finally:
        await streams.close()
        await target.close()


async def not_ready_at(target: Target) -> float:
    """Wait until the server says that it accepts nothing, or nobody answers; return when."""
    # Another process is asked: there is no event to wait for.
    while await target.is_ready():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return time.monotonic()


async def measure_loss(
    target: Target, streams: Streams, pids: Sequence[int], measured: Measured, *, since: float | None, words: str
) -> None:
    """Measure how a lost group ends: readiness, streams, processes. ``words``: a pattern in every stream's error.

    All three are waited for at once: what never comes costs no more than one ``HANG_S``.
    """
    ended_at, gone_at, unready_at = await asyncio.gather(
        _all_ended(streams, measured),
        _or_never(until_gone(pids, HANG_S)),
        _or_never(asyncio.wait_for(not_ready_at(target), HANG_S)),
    )
    began = since if since is not None else max(log.token_at for log in streams.logs)
    measured.seconds["last stream ended"] = ended_at - began
    measured.seconds["not ready"] = unready_at - began
    after = ended_at if ended_at < inf else began  # streams that never end: since the fault
    measured.seconds["ranks gone after that"] = max(gone_at - after, 0.0)
    for log in streams.logs:
        measured.must(log.num_ends < 2, f"a stream ended {log.num_ends} times")
        right = not log.num_ends or re.search(words, log.error)
        measured.must(right, f"a stream ended with {log.error!r}, not with {words!r}")


async def _all_ended(streams: Streams, measured: Measured) -> float:
    """Return when the last stream ended; never, where we gave up waiting."""
    try:
        return await streams.all_ended(HANG_S)
    except TimeoutError as error:
        measured.wrong.append(str(error))
        return inf
    finally:
        measured.ends = [_end_of(log) for log in streams.logs]


def _end_of(log: StreamLog) -> str:
    """Say in short what a client was told."""
    if not log.num_ends:
        return "nothing"
    return log.error[:120] or "the end, as if all was well"


async def _or_never(moment: Awaitable[float]) -> float:
    try:
        return await moment
    except TimeoutError:
        return inf


def served(around: Surroundings, settings: Settings, model: str = "") -> Target:
    """Return the target of the cases that vLLM has too."""
    if settings.peer:
        return Vllm(around, settings.peer, settings.vocab_size)
    return Served(around, model or settings.model, settings.ranks, *settings.flags)


def _signalled(number: signal.Signals, ours: str) -> Callable[[Surroundings, Settings, int], Awaitable[Measured]]:
    async def run(around: Surroundings, settings: Settings, repetition: int) -> Measured:
        measured, target = Measured(), served(around, settings)
        async with running(target, settings) as (streams, pids):
            rank = repetition % len(pids)
            since = time.monotonic()
            os.kill(pids[rank], number)
            words = "" if settings.peer else f"Aborted: .*rank {rank} {ours}"
            await measure_loss(target, streams, pids, measured, since=since, words=words)
        return measured

    return run


def _scripted_fault(kind: str, ours: str) -> Callable[[Surroundings, Settings, int], Awaitable[Measured]]:
    async def run(around: Surroundings, settings: Settings, repetition: int) -> Measured:
        measured, target = Measured(), served(around, settings, settings.scripted(kind))
        # The fault comes at its step; the last token before it is when it came, a step more or less.
        async with running(target, settings) as (streams, pids):
            await measure_loss(target, streams, pids, measured, since=None, words=f"Aborted: .*{ours}")
        return measured

    return run


async def _control_plane_killed(around: Surroundings, settings: Settings, repetition: int) -> Measured:
    measured, target = Measured(), served(around, settings)
    async with running(target, settings) as (streams, _):
        pids = tree(target.main.pid)
        since = target.main.send_signal(signal.SIGKILL)
        measured.seconds["last stream ended"] = await _all_ended(streams, measured) - since
        measured.seconds["nothing left"] = await _or_never(until_gone(pids, HANG_S)) - since
        if measured.seconds["nothing left"] == inf:
            measured.wrong.append(f"{sum(map(is_alive, pids))} processes lived on after {HANG_S:g} s")
        elif not settings.peer:
            # The sockets of a process go with its last thread, a moment after the process counts as dead.
            await until(lambda: not any(around.left().values()), 30.0, "the end of its sockets and files")
            measured.seconds["nothing left"] = time.monotonic() - since
    return measured


async def _taken_over(
    around: Surroundings, settings: Settings, leave: Callable[[Elsewhere], Awaitable[float]], *flags: str
) -> Measured:
    """Have one control plane go and another come; ``leave`` returns when the lease was free."""
    measured, num_tokens = Measured(), 120
    expected = await _undisturbed(around, settings, num_tokens)
    target = Elsewhere(around, settings.model, settings.ranks, *settings.flags, *flags)
    async with running(target, settings, num_tokens) as (streams, pids):
        free_at = await leave(target)
        control_plane = target.main
        ready_at = await ready(control_plane)
        measured.seconds["ready"] = ready_at - max(control_plane.started_at, free_at)
        granted, started = control_plane.logged("epoch.held"), control_plane.logged("engine.started")
        if control_plane.logged("group.adopted") and granted and started:
            spent = datetime.fromisoformat(started[-1]["timestamp"]) - datetime.fromisoformat(granted[-1]["timestamp"])
            measured.seconds["of that, protocol"] = spent.total_seconds()
        else:
            measured.wrong.append("the group was not adopted")
        await streams.all_ended(HANG_S)
        measured.must(await target.rank_pids() == pids, "the ranks are not those of before")
        for log, wanted in zip(streams.logs, expected, strict=True):
            _compare(log, wanted, measured, settings)
    return measured


def _compare(log: StreamLog, wanted: StreamLog, measured: Measured, settings: Settings) -> None:
    measured.must(not log.error, f"a stream ended with {log.error!r}")
    measured.must(
        log.num_tokens == wanted.num_tokens, f"a stream has {log.num_tokens} tokens instead of {wanted.num_tokens}"
    )
    # Over several ranks sums are not in one order, so that a near tie may fall otherwise (rule (c) of the docs).
    if settings.ranks == 1 or parse_scripted(settings.model):
        measured.must(log.token_ids == wanted.token_ids, "a stream has other tokens than an undisturbed run")
    else:
        num_equal = next(
            (at for at, pair in enumerate(zip(log.token_ids, wanted.token_ids, strict=False)) if pair[0] != pair[1]),
            len(wanted.token_ids),
        )
        measured.must(num_equal >= _TOKENS_BEFORE, f"a stream parts from an undisturbed run after {num_equal} tokens")


_UNDISTURBED: dict[tuple[str, int, int], list[StreamLog]] = {}


async def _undisturbed(around: Surroundings, settings: Settings, num_tokens: int) -> list[StreamLog]:
    key = settings.model, settings.ranks, num_tokens
    if key not in _UNDISTURBED:
        target = Served(around, settings.model, settings.ranks, *settings.flags)
        await target.start()
        streams = Streams(target, settings.vocab_size, num_tokens)
        await streams.all_ended(HANG_S)
        await target.close()
        if errors := [log.error for log in streams.logs if log.error]:
            raise RuntimeError(f"an undisturbed run failed: {errors}")
        _UNDISTURBED[key] = streams.logs
    return _UNDISTURBED[key]


async def _takeover_after_kill(around: Surroundings, settings: Settings, repetition: int) -> Measured:
    async def leave(target: Elsewhere) -> float:
        killed_at = target.main.send_signal(signal.SIGKILL)
        target.start_control_plane()
        # Its last message may have gone out a report interval before.
        return killed_at + settings.lease_s - 0.1

    return await _taken_over(around, settings, leave)


async def _takeover_by_handover(around: Surroundings, settings: Settings, repetition: int) -> Measured:
    async def leave(target: Elsewhere) -> float:
        told_at = target.main.send_signal(signal.SIGTERM)
        old = target.main
        await until(lambda: old.exit_code() is not None, HANG_S, "the end of the old control plane")
        target.start_control_plane()
        return told_at

    return await _taken_over(around, settings, leave, "--handover")


CASES = (
    Case(
        "rank killed",
        _signalled(signal.SIGKILL, "exited: killed by SIGKILL"),
        lambda s: {"last stream ended": 1.0, "not ready": 1.0, "ranks gone after that": 2.0},
        for_peer=True,
    ),
    Case(
        "rank stopped",
        _signalled(signal.SIGSTOP, "was silent"),
        lambda s: {
            "last stream ended": s.heartbeat_timeout_s + 1.0,
            "not ready": s.heartbeat_timeout_s + 1.0,
            # A stopped process takes no signal but the last; it is killed after the grace of 2 s.
            "ranks gone after that": 4.0,
        },
        for_peer=True,
    ),
    Case(
        "step wedged",
        _scripted_fault("hang", f"stuck in .*step {_FAULT_STEP}"),
        lambda s: {
            "last stream ended": s.step_timeout_s + 1.0,
            "not ready": s.step_timeout_s + 1.0,
            "ranks gone after that": 2.0,
        },
    ),
    Case(
        "other rank raises",
        _scripted_fault("raise", f"rank 1 failed in step {_FAULT_STEP}: InjectedFault"),
        lambda s: {"last stream ended": 0.5, "not ready": 1.0, "ranks gone after that": 2.0},
    ),
    Case(
        "control plane killed",
        _control_plane_killed,
        lambda s: {"nothing left": 5.0},
        for_peer=True,
    ),
    Case("takeover after kill", _takeover_after_kill, lambda s: {"ready": 2.0, "of that, protocol": 0.3}),
    Case("takeover by handover", _takeover_by_handover, lambda s: {"ready": 2.0, "of that, protocol": 0.3}),
)
