"""Show what a server announces: bars on a terminal, plain lines on a pipe, JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from control_plane.announcement import Announcement, Lost, OpenAiReady, Ready, StageProgress, Stopping
from control_plane.cli.command_name import command_name
from maniple_client.channel import DEFAULT_ADDRESS
from service_chassis.ids import Rank
from service_chassis.lossy_stream import LossyStream, plain_notice
from service_chassis.server_address import local_target

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_WAIT_S = 1.0  # for a program that reads slowly, at what it must not miss

_KINDS: dict[str, Callable[..., Announcement]] = {
    "stage": StageProgress,
    "ready": Ready,
    "openai_ready": OpenAiReady,
    "lost": Lost,
    "stopping": Stopping,
}


def to_json(announcement: Announcement) -> str:
    """Return one line of JSON: the fields, and ``event``, one of stage, ready, openai_ready, lost, stopping."""
    event = next(name for name, kind in _KINDS.items() if type(announcement) is kind)
    return json.dumps({"event": event, **dataclasses.asdict(announcement)})


def from_json(line: str) -> Announcement | None:
    """Return what ``to_json`` wrote; None for a line that is something else."""
    try:
        values: dict[str, Any] = json.loads(line)
        return _KINDS[values.pop("event")](**values)
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def ready_line(ready: Ready) -> str:
    """Say that requests are accepted, and what to type next."""
    target = local_target(ready.address)
    at = "" if target == DEFAULT_ADDRESS else f" --server {target}"
    at += f" {ready.client_flags}" if ready.client_flags else ""
    tokens = ready.num_blocks * ready.block_size
    return (
        f"Serving {ready.model} on {ready.address} (context {ready.max_model_len} tokens, KV cache {tokens} tokens). "
        f"Now type: {command_name()} chat{at}"
    )


def openai_line(ready: OpenAiReady) -> str:
    """Say what OpenAI clients take as their base URL."""
    return f"OpenAI clients: {ready.url}"


def stage_label(stage: str, rank: Rank, group: str = "") -> str:
    """Name a stage. Rank 0 goes without saying: fetching has no rank, and most groups have one."""
    where = [f"rank {rank}"] if rank else []
    where += [f"group {group}"] if group else []
    return f"{stage} on {' of '.join(where)}" if where else stage


def lost_line(lost: Lost) -> str:
    """Say that workers are gone, and what happens now."""
    who = f"group {lost.group}" if lost.group else "the workers"
    then = "giving up" if lost.retry_in_s is None else f"starting them anew in {lost.retry_in_s:g} s"
    return f"Lost {who}: {lost.reason}; {then}"


def stopping_line(stopping: Stopping) -> str:
    """Say why the server goes, and whom it waits for."""
    if not stopping.num_running:
        return f"Stopping: {stopping.reason}"
    requests = "1 request" if stopping.num_running == 1 else f"{stopping.num_running} requests"
    within = f" within {stopping.wait_s:g} s" if stopping.wait_s else ""
    again = (
        f"; {stopping.again} again ends {'it' if stopping.num_running == 1 else 'them'} now" if stopping.again else ""
    )
    return f"Stopping: {stopping.reason}; {requests} may still finish{within}{again}"


class Display(Protocol):
    """Shows announcements while its ``with`` block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def __call__(self, announcement: Announcement) -> None: ...


class JsonLines:
    """For programs: every announcement, one line each."""

    def __init__(self, out: TextIO) -> None:
        self._out = LossyStream(out, lambda num_lines: json.dumps({"event": "dropped", "num_lines": num_lines}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, announcement: Announcement) -> None:
        wait_s = 0.0 if isinstance(announcement, StageProgress) else _WAIT_S
        self._out.write(to_json(announcement) + "\n", wait_s)


class PlainLines:
    """For logs and pipes: one line when a stage begins, not one for each percent."""

    def __init__(self, out: TextIO) -> None:
        self._out = LossyStream(out, plain_notice)
        self._said: set[tuple[str, Rank, str]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, announcement: Announcement) -> None:
        match announcement:
            case StageProgress(stage=stage, rank=rank, detail=detail, group=group):
                if (stage, rank, group) not in self._said:
                    self._said.add((stage, rank, group))
                    self._print(stage_label(stage, rank, group) + (f": {detail}" if detail else ""))
            case Ready():
                self._print(ready_line(announcement))
            case OpenAiReady():
                self._print(openai_line(announcement))
            case Lost():
                self._print(lost_line(announcement))
            case Stopping():
                self._print(stopping_line(announcement))

    def _print(self, line: str) -> None:
        self._out.write(line + "\n", _WAIT_S)


class Bars:
    """For people: a bar per stage and rank, gone when the server is ready."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(file=out)
        self._progress: Progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[tuple[str, Rank, str], TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, announcement: Announcement) -> None:
        match announcement:
            case StageProgress(stage=stage, rank=rank, share=share, detail=detail, group=group):
                key = (stage, rank, group)
                if key not in self._tasks:
                    # A rank is in one stage at a time: what came before is done, whether it said so or not.
                    for (_, *other), task in self._tasks.items():
                        if other == [rank, group]:
                            self._progress.update(task, completed=1.0, detail="")
                    self._tasks[key] = self._progress.add_task(stage_label(stage, rank, group), total=1.0, detail="")
                self._progress.update(self._tasks[key], completed=share, detail=detail)
            case Ready():
                self._progress.stop()
                self._console.print(ready_line(announcement), highlight=False, soft_wrap=True)
            case OpenAiReady():
                self._console.print(openai_line(announcement), highlight=False, soft_wrap=True)
            case Lost():
                self._progress.stop()
                self._console.print(lost_line(announcement), highlight=False, soft_wrap=True)
            case Stopping():
                self._progress.stop()
                # Over the ^C that a terminal shows.
                self._console.print(f"\r{stopping_line(announcement)}", highlight=False, soft_wrap=True)


FORMATS = ("auto", "plain", "json")


def display(kind: str = "auto", out: TextIO | None = None) -> Display:
    """Return the display for ``kind``, one of FORMATS; auto is bars on a terminal and plain lines elsewhere."""
    out = out or sys.stdout
    if kind == "json":
        return JsonLines(out)
    if kind == "auto" and out.isatty():
        return Bars(out)
    return PlainLines(out)


class CurrentStderr:
    """Standard error as it is at each write: while bars are shown it is a proxy that prints above them."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def isatty(self) -> bool:
        return sys.stderr.isatty()
