"""Start servers, know every process that belongs to them, and see what they leave behind. Reads /proc; Linux."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_MARK = "MANIPLE_BENCH_MARK"
# Semaphores of Python's multiprocessing, which no server here uses: a neighbour's.
_OF_MULTIPROCESSING = "sem.mp-"


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def tree(root: int) -> set[int]:
    """Return a process and everything below it."""
    of, found = parents(), {root}
    while more := {pid for pid, parent in of.items() if parent in found} - found:
        found |= more
    return found


def children_of(pid: int) -> set[int]:
    """Return the direct children of a process."""
    return {child for child, parent in parents().items() if parent == pid}


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor time that processes have used; none of those that have ended."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def title_of(pid: int) -> str:
    """Return the command line of a process, or what it calls itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Surroundings:
    """A directory for everything temporary of the servers started in it, and a mark by which they are known."""

    def __init__(self, prefix: str = "faults-of-maniple-") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=prefix))
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self._shm = set(os.listdir("/dev/shm"))

    def start(self, command: Sequence[str], name: str) -> Started:
        """Start a command whose temporary files come here, and whose processes carry the mark."""
        return Started(command, self.environ, self.directory / f"{name}.log")

    @property
    def environ(self) -> dict[str, str]:
        """The environment of what is started here."""
        return os.environ | {_MARK: self.mark, "TMPDIR": str(self.temporary)}

    def pids(self) -> set[int]:
        """Return every living process with the mark, whoever its parent is by now."""
        wanted, found = f"{_MARK}={self.mark}".encode(), set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if wanted in (entry / "environ").read_bytes() and is_alive(int(entry.name)):
                        found.add(int(entry.name))
        return found

    def temporary_files(self) -> list[str]:
        """Return what lies in the temporary directory."""
        return sorted(str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*"))

    def sockets(self) -> list[str]:
        """Return the Unix sockets that are bound in our directory."""
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sorted({line.split()[-1] for line in lines if str(self.directory) in line})

    def shared_memory(self) -> list[str]:
        """Return files in /dev/shm that are new and that no living process holds: those are leaks, ours or not."""
        names = {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_MULTIPROCESSING)}
        new = {f"/dev/shm/{name}" for name in names - self._shm}
        return sorted(new - _held(new)) if new else []

    def left(self) -> dict[str, list[str]]:
        """Return all that is left, by kind; empty lists where nothing is."""
        return {
            "processes": sorted(map(str, self.pids())),
            "sockets": self.sockets(),
            "shared memory": self.shared_memory(),
            "temporary files": self.temporary_files(),
        }

    def kill_all(self) -> None:
        """End by force every process that has the mark."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """End what still lives, and delete the directory and what was left in shared memory."""
        self.kill_all()
        for path in self.shared_memory():
            with suppress(OSError):
                os.unlink(path)
        shutil.rmtree(self.directory, ignore_errors=True)


def _held(paths: set[str]) -> set[str]:
    held = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                maps = (entry / "maps").read_text()
                held |= {path for path in paths if path in maps}
                held |= paths & {os.readlink(fd) for fd in (entry / "fd").iterdir()}
    return held


class Started:
    """A process that was started, and what it writes to standard output, line by line with the time."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], log: Path) -> None:
        self.log_path = log
        self.started_at = time.monotonic()
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            list(command), stdout=subprocess.PIPE, stderr=self._log, env=environ, start_new_session=True
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""
        self.lines: list[tuple[float, str]] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> float:
        """Send a signal; return when."""
        self._process.send_signal(number)
        return time.monotonic()

    def exit_code(self) -> int | None:
        """Return the exit code; None while it lives."""
        return self._process.poll()

    def read(self) -> list[tuple[float, str]]:
        """Read what it has written by now; return all lines with the times at which they were read."""
        assert self._process.stdout is not None
        self._rest += self._process.stdout.read() or b""
        *lines, self._rest = self._rest.split(b"\n")
        now = time.monotonic()
        self.lines += [(now, line.decode(errors="replace")) for line in lines]
        return self.lines

    def events(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the JSON lines of one kind that it has written, with their times."""
        found = []
        for at, line in self.read():
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == kind:
                    found.append((at, event))
        return found

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return what it logged under an event's name, so far."""
        found = []
        for line in self.log_path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") == event:
                    found.append(entry)
        return found

    async def end(self, timeout_s: float = 30.0) -> int:
        """Ask it to end and wait; by force when it takes too long. Return the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        with suppress(TimeoutError):
            await until(lambda: self._process.poll() is not None, timeout_s, "the end", every_s=0.02)
        if self._process.poll() is None:
            self._process.kill()
        code = await asyncio.to_thread(self._process.wait)
        self._log.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def log_tail(self, num_lines: int = 20) -> str:
        """Return the end of its log, for people."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])


async def until(condition: Callable[[], object], timeout_s: float, what: str, *, every_s: float = 0.005) -> float:
    """Wait for a condition; return when it was seen. Raises ``TimeoutError`` naming ``what``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        await asyncio.sleep(every_s)
    return time.monotonic()


async def until_gone(pids: Iterable[int], timeout_s: float) -> float:
    """Wait until none of these processes lives; return when that was seen."""
    left = set(pids)

    def are_gone() -> bool:
        left.difference_update({pid for pid in left if not is_alive(pid)})
        return not left

    return await until(are_gone, timeout_s, f"the end of {len(left)} processes")
