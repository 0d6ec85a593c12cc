"""Get compilers and libraries of other languages from package registries, into a directory of ours.

Nothing is installed on the system and nobody need be root: Debian's packages and PyPI's wheels are downloaded and
unpacked, npm's go where npm puts them. A second run finds them there. What cannot be had raises ``Unavailable``, with
the reason.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_DOWNLOAD_S = 300


class Unavailable(Exception):
    """A toolchain cannot be had here."""


def cache_directory() -> Path:
    """Where downloads are kept: beside the fetched models."""
    base = os.environ.get("MANIPLE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "maniple"
    )
    return Path(base) / "toolchains"


def debian(packages: Sequence[str]) -> Path:
    """Return a directory under which these packages, and those they need and the system lacks, lie unpacked."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None:
        raise Unavailable("this is no Debian: apt-get is missing")
    release = _release()
    key = hashlib.sha256("\n".join([release, *sorted(packages)]).encode()).hexdigest()[:12]
    with locked(cache_directory()) as cache:
        root = cache / f"{release}-{key}"
        if not root.is_dir():
            unpacked = cache / f"{release}-{key}.part"
            shutil.rmtree(unpacked, ignore_errors=True)
            unpacked.mkdir(parents=True)
            for archive in _download(apt, cache / "apt", packages):
                _run([dpkg, "-x", str(archive), str(unpacked)])
            unpacked.rename(root)
    return root


def pypi(requirement: str) -> Path:
    """Return a directory under which this wheel, ``NAME==VERSION``, lies unpacked; nothing that it needs beside it."""
    with locked(cache_directory()) as cache:
        root = cache / requirement.replace("==", "-")
        if not root.is_dir():
            unpacked = cache / f"{root.name}.part"
            shutil.rmtree(unpacked, ignore_errors=True)
            wheels = cache / "wheels"
            shutil.rmtree(wheels, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
            _run([*pip, "--no-deps", "--only-binary", ":all:", "-d", str(wheels), requirement])
            for wheel in wheels.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(unpacked)
            shutil.rmtree(wheels)
            unpacked.rename(root)
    return root


def environment_of(requirement: str) -> Path:
    """Return a virtual environment that holds this requirement, ``NAME==VERSION``, and what it needs."""
    with locked(cache_directory()) as cache:
        root = cache / f"venv-{requirement.replace('==', '-')}"
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(root)])
            _run([str(root / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", requirement])
            (root / "complete").touch()
    return root


def npm(project: Path) -> None:
    """Have ``node_modules`` in a directory as its package-lock.json asks for."""
    tool = shutil.which("npm")
    if tool is None or shutil.which("node") is None:
        raise Unavailable("node and npm are not installed")
    installed, wanted = project / "node_modules/.package-lock.json", project / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
        _run([tool, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=project)


def environment(root: Path, **more: str) -> dict[str, str]:
    """Return this process's environment with a directory of unpacked packages before it."""
    libraries = [root / "usr/lib" / f"{os.uname().machine}-linux-gnu", root / "usr/lib"]
    path = [root / "usr/bin", *map(Path, os.get_exec_path())]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "PATH": os.pathsep.join(map(str, path)),
        "LD_LIBRARY_PATH": os.pathsep.join([*map(str, libraries), *([inherited] if inherited else [])]),
        **more,
    }


def _release() -> str:
    facts = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return f"{facts.get('ID', 'linux')}{facts.get('VERSION_ID', '')}".replace('"', "")


def _download(apt: str, state: Path, packages: Sequence[str]) -> list[Path]:
    archives = state / "archives"
    # apt does not list what lies there already, from another call.
    shutil.rmtree(archives, ignore_errors=True)
    (archives / "partial").mkdir(parents=True)
    (state / "lists/partial").mkdir(parents=True, exist_ok=True)
    # Lists and archives of our own: those of the system may be missing, old, or root's alone.
    quiet = ["-qq", "-o", "Debug::NoLocking=1", "-o", f"Dir::State::lists={state}/lists", "-o", f"Dir::Cache={state}"]
    _run([apt, *quiet, "update"])
    listed = _run([apt, *quiet, "install", "--print-uris", "-y", "--no-install-recommends", *packages])
    # 'uri' file size hash, where the file is NAME_VERSION_ARCHITECTURE.deb. What the system has is not among them.
    names = [line.split()[1].split("_")[0] for line in listed.splitlines() if line.startswith("'")]
    if names:
        _run([apt, *quiet, "download", *names], cwd=archives)
    return [next(archives.glob(f"{name}_*.deb")) for name in names]


def _run(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command[:2])} took more than {_DOWNLOAD_S} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no word why").splitlines()[-1]
        raise Unavailable(f"{Path(command[0]).name} failed: {last}")
    return done.stdout


@contextmanager
def locked(cache: Path) -> Iterator[Path]:
    """Let one process at a time download."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache
