"""The servers of the table: how each is started, when it answers, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from doors import make_door
from load import Door
from processes import Surroundings, cpu_s, is_alive, tree
from targets import free_ports, maniple

STOP_TIMEOUT_S = 30.0
VOCAB_SIZE = 49152  # of the demo model: OpenAI's API does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What the servers are made of."""

    model: Path  # the demo model's directory
    gguf: Path  # the file that it was made from, Q4_1
    vllm: Path  # environments of the peers
    llama: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to start one server."""

    door: str  # of doors.make_door
    words: Callable[[Places, int], Sequence[str]]  # from where everything is and the port
    ready_timeout_s: float = 120.0
    environ: Callable[[Places], Mapping[str, str]] = lambda places: {}


def _ours(*flags: str) -> Recipe:
    def words(places: Places, port: int) -> list[str]:
        model = str(places.gguf if "--gguf" in flags else places.model)
        kept = [flag for flag in flags if flag != "--gguf"]
        return maniple("serve", "--model", model, "--listen", f"127.0.0.1:{port}", "--log-level", "warning", *kept)

    return Recipe(door="maniple", words=words)


def _vllm(dtype: str, environ: Callable[[Places], Mapping[str, str]]) -> Recipe:
    def words(places: Places, port: int) -> list[str]:
        command = [str(places.vllm / "bin" / "vllm"), "serve", str(places.model), "--dtype", dtype]
        return [*command, "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]

    return Recipe(door="openai", words=words, ready_timeout_s=900.0, environ=environ)  # it compiles


def _vllm_by_itself(places: Places) -> dict[str, str]:
    return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}


def _vllm_tuned(places: Places) -> dict[str, str]:
    # By itself it leaves one core to its scheduler, which on two cores is half the machine.
    environ = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
    # Its log recommends to preload this, and it is installed along with it: a quarter more tokens/s for one request.
    openmp = places.vllm / "lib" / "libiomp5.so"
    return _vllm_by_itself(places) | environ | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def _llama(places: Places, port: int) -> list[str]:
    here = Path(__file__).parent
    return [
        *(str(places.llama / "bin" / "python"), str(here / "llama_cpp_server.py"), str(places.gguf)),
        *("--port", str(port)),
    ]


RECIPES: dict[str, Recipe] = {
    "ours": _ours("--dtype", "bfloat16"),
    "ours-float32": _ours("--dtype", "float32"),
    "ours-int8": _ours("--quantization", "int8"),
    "ours-q4": _ours("--gguf", "--quantization", "q4"),
    "vllm": _vllm("bfloat16", _vllm_by_itself),
    "vllm-tuned": _vllm("bfloat16", _vllm_tuned),
    "vllm-float32": _vllm("float32", _vllm_by_itself),
    "llama": Recipe(door="llama", words=_llama),
}


class Server:
    """One that runs."""

    def __init__(self, name: str, around: Surroundings, places: Places) -> None:
        self.name = name
        self.log_path = Path(tempfile.gettempdir()) / f"maniple-bench-{name}.log"
        self._recipe = RECIPES[name]
        port = free_ports(1)
        words = self._recipe.words(places, port)
        # A peer must not find our packages in its way.
        environ = {key: value for key, value in around.environ.items() if key != "PYTHONPATH"}
        self.started_at = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ | dict(self._recipe.environ(places)),
                start_new_session=True,  # Ctrl-C is for us, who then end it in good order
            )
        url = f"127.0.0.1:{port}"
        self.door = make_door(self._recipe.door, url, "", VOCAB_SIZE)
        self.vocab_size = 0
        self.ready_after_s = 0.0

    async def until_ready(self) -> None:
        """Wait until it answers. Raises ``RuntimeError`` with the end of its log where it does not."""
        await self.door.__aenter__()
        try:
            self.vocab_size = await wait_until_ready(self.door, self._process.poll, self._recipe.ready_timeout_s)
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}: {error}; {self.log_path} ends with: {self.log_tail()}") from error
        self.ready_after_s = time.monotonic() - self.started_at

    def is_alive(self) -> bool:
        """Whether its main process lives."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the processor time of all its processes."""
        return cpu_s(tree(self._process.pid))

    def log_tail(self, num_lines: int = 3) -> str:
        """Return the last words of its log in one line."""
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return " / ".join(line.strip()[:300] for line in lines[-num_lines:])

    def ask_to_end(self) -> None:
        """Send SIGTERM to its main process."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Wait for its main process; no longer than so."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


async def wait_until_ready(door: Door, exit_code: Callable[[], int | None], timeout_s: float) -> int:
    """Wait until a server answers; return its vocabulary's size. Raises ``RuntimeError`` when it will not."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return await door.vocab_size()
        except (OSError, EOFError, ValueError, IndexError) as error:  # what half an HTTP answer gives among them
            if (code := exit_code()) is not None:
                raise RuntimeError(f"it ended with exit code {code}") from error
            if time.monotonic() > end:
                raise RuntimeError(f"it did not answer within {timeout_s:g} s: {error}") from error
        await asyncio.sleep(0.25)


class Stage:
    """The servers of one scene. Leaving the block ends every process of theirs, whatever happened."""

    def __init__(self, names: Sequence[str], places: Places) -> None:
        self._names = names
        self._places = places
        self.servers: list[Server] = []

    async def __aenter__(self) -> list[Server]:
        self._around = Surroundings("bench-of-maniple-")
        try:
            # The slow ones first: ours is not to idle for minutes beside a compiler, nor to compete with it.
            for name in sorted(self._names, key=lambda name: -RECIPES[name].ready_timeout_s):
                server = Server(name, self._around, self._places)
                self.servers.append(server)
                print(f"starting {name}; its log is {server.log_path}", file=sys.stderr, flush=True)
                await server.until_ready()
                print(f"{name} answers after {server.ready_after_s:.1f} s", file=sys.stderr, flush=True)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return sorted(self.servers, key=lambda server: self._names.index(server.name))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all()
        for server in self.servers:
            with suppress(Exception):  # a channel to a server that is gone
                await server.door.__aexit__(None, None, None)

    def _end_all(self) -> None:
        # Not async: a second Ctrl-C must not leave half of it undone.
        for server in self.servers:
            server.ask_to_end()
        try:
            for server in self.servers:
                server.wait(STOP_TIMEOUT_S)
        finally:
            self._around.kill_all()
            deadline = time.monotonic() + 5.0
            while any(map(is_alive, self._around.pids())) and time.monotonic() < deadline:
                time.sleep(0.05)
            shutil.rmtree(self._around.directory, ignore_errors=True)
