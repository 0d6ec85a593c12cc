"""Read a Dockerfile's instructions, and do its build stage's in a directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str
    stage: int  # 0: before the first FROM


def instructions(path: Path) -> Iterator[Instruction]:
    """Yield them with continued lines joined and comments left out."""
    stage, pending = 0, ""
    for line in path.read_text().splitlines():
        if line.lstrip().startswith("#") or not (line.strip() or pending):
            continue
        pending += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        word, _, rest = pending.strip().partition(" ")
        pending = ""
        stage += word == "FROM"
        yield Instruction(word, rest.strip(), stage)


def build(path: Path, directory: Path, arguments: Mapping[str, str]) -> Path:
    """Do the first stage in ``directory``: what it would have under /opt is in ``directory``/opt, which is returned.

    FROM is this machine's Python, COPY takes what the context has, RUN is run by sh, stopping at the first that fails.
    """
    source, opt = directory / "src", directory / "opt"
    source.mkdir(parents=True)
    opt.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    for one in instructions(path):
        if one.stage != 1:
            continue
        match one.word:
            case "ARG":
                name, _, default = one.rest.partition("=")
                variables[name] = arguments.get(name, default.strip('"'))
            case "ENV":
                variables |= dict(re.findall(r"(\w+)=(\S+)", one.rest))
            case "COPY":
                *froms, to = one.rest.split()
                for name in froms:
                    _copy(ROOT / name, source / (Path(name).name if to == "./" else to))
            case "RUN":
                command = one.rest.replace("/opt/", f"{opt}/")
                done = subprocess.run(
                    ["sh", "-ec", command], cwd=source, env=variables, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            case "FROM" | "WORKDIR":
                pass
            case other:
                raise AssertionError(f"a build stage does no {other}")
    return opt


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        shutil.copy(source, target)
