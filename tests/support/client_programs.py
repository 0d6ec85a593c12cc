"""Build the client programs of clients/, run them, and read the JSON lines that they print."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import toolchains
from support.toolchains import Unavailable

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
_BUILD_S = 300

_PROTOC = ("protobuf-compiler", "libprotobuf-dev")
_GO = (
    *("golang-go", "golang-google-grpc-dev", "golang-google-protobuf-dev", "golang-github-golang-protobuf-1-5-dev"),
    *("protoc-gen-go-1-5", "protoc-gen-go-grpc", *_PROTOC),
)
_JAVA = (
    *("libgrpc-java", "libprotobuf-java", "libnetty-java", "libguava-java", "libperfmark-java"),
    *("libgeronimo-annotation-1.3-spec-java", "protobuf-compiler-grpc-java-plugin", *_PROTOC),
)
_CPP = ("libgrpc++-dev", "protobuf-compiler-grpc", *_PROTOC)


@dataclass(frozen=True)
class Program:
    """How to run a client."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def start(self, *words: str) -> Run:
        return Run(self, words)

    def run(self, *words: str, timeout_s: float = 60.0) -> Run:
        """Run it to its end."""
        one = self.start(*words)
        one.wait(timeout_s)
        return one


class Run:
    """One run of a client: what it has said, and how it ended."""

    def __init__(self, program: Program, words: Sequence[str]) -> None:
        self.program = program
        self.started_at = time.monotonic()
        self.lines: list[str] = []
        self.aside = ""  # on standard error, once it ended
        self._process = subprocess.Popen(
            [*program.command, *words],
            env=dict(program.env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.aside = self._process.stderr.read()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Return the exit code."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"it does not end: {self}") from None
        for reader in self._readers:
            reader.join(5)
        return code

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it said, a JSON object a line."""
        return [json.loads(line) for line in list(self.lines)]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def token_ids(self) -> list[int]:
        """The output of sample 0, since it last started over."""
        ids: list[int] = []
        for event in self.events:
            if event["event"] == "starting_over":
                ids.clear()
            elif event["event"] == "chunk":
                ids += event["token_ids"]
        return ids

    def text(self) -> str:
        return "".join(event["text"] for event in self.of("chunk"))

    def until(self, condition: Callable[[Run], object], what: str, *, timeout_s: float = 30.0) -> None:
        """Wait until it has said something."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}: {self}"
            assert self.exit_code is None or condition(self), f"it ended before {what}: {self}"
            time.sleep(0.01)

    def __repr__(self) -> str:
        said = [line for line in list(self.lines) if '"chunk"' not in line]
        return f"{self.program.name} exit={self.exit_code} said {said} and, aside, {self.aside!r}"


def build_all(wanted: Sequence[str]) -> dict[str, Program | Exception]:
    """Build the named clients, two at a time; where one cannot be had or built, the reason stands in its place."""

    def build(name: str) -> Program | Exception:
        try:
            return _BUILDERS[name]()
        except (Unavailable, BuildFailed) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(build, wanted), strict=True))


class BuildFailed(Exception):
    """It should have been built, and was not."""


def _go() -> Program:
    root = toolchains.debian(_GO)
    go = toolchains.environment(root, GOROOT=str(root / "usr/lib/go"), GOFLAGS="-trimpath")
    _make("go", ["gopath", f"GOCODE={root}/usr/share/gocode"], go)
    return Program("go", [str(CLIENTS / "go/build/maniple-go")])


def _cpp() -> Program:
    if shutil.which("g++") is None or shutil.which("pkg-config") is None:
        raise Unavailable("g++ or pkg-config is not installed")
    root = toolchains.debian(_CPP)
    libraries = f"{root}/usr/lib/{os.uname().machine}-linux-gnu"
    env = toolchains.environment(
        root, CPATH=f"{root}/usr/include", LIBRARY_PATH=libraries, PKG_CONFIG_PATH=f"{libraries}/pkgconfig"
    )
    _make("cpp", ["CXXFLAGS=-O1 -Werror"], env)
    return Program("cpp", [str(CLIENTS / "cpp/build/maniple-cpp")], env)


def _java() -> Program:
    if shutil.which("javac") is None:
        raise Unavailable("no JDK is installed")
    root = toolchains.debian(_JAVA)
    _make("java", [f"JARS={root}/usr/share/java /usr/share/java"], toolchains.environment(root))
    return Program("java", [str(CLIENTS / "java/build/maniple-java")])


def _node() -> Program:
    toolchains.npm(CLIENTS / "node")
    return Program("node", ["node", str(CLIENTS / "node/main.js")])


def _python(name: str) -> Program:
    return Program(f"python-{name}", [sys.executable, str(CLIENTS / f"python/examples/{name}_client.py")])


_BUILDERS: dict[str, Callable[[], Program]] = {
    "cpp": _cpp,
    "go": _go,
    "java": _java,
    "node": _node,
    "python-sync": lambda: _python("sync"),
    "python-async": lambda: _python("async"),
}
NAMES = tuple(_BUILDERS)


def _make(name: str, words: Sequence[str], env: Mapping[str, str]) -> None:
    command = ["make", "--no-print-directory", "-C", str(CLIENTS / name), *words]
    # MAKEFLAGS of an outer make would bring its own variables and its jobs.
    clean = {key: value for key, value in env.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"make -C clients/{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
