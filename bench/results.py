"""Where results are kept, one JSON object a line, and on what machine they were taken."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DIRECTORY = HERE / "results"


def machine_facts() -> dict[str, Any]:
    """Return what figures depend on: processor, cores, memory, kernel."""
    return {
        "cpu": cpu_name(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's name, with the family and model that tell generations apart where the name does not."""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE))
    name = found.get("model name", platform.machine())
    return f"{name} (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else name


def slug_of(facts: Mapping[str, Any]) -> str:
    """Return the machine's part of a file name, such as ``amd-epyc-family-26-model-2-2-cores``."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{facts['cpu']} {facts['cores']} cores".lower())
    return words.strip("-")


def commit() -> str:
    """Return the commit that is measured, with a plus sign where files differ from it; empty outside a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=HERE, capture_output=True)
    except OSError:
        return ""
    return f"{head.stdout.strip()}{'+' if changed.returncode else ''}" if head.returncode == 0 else ""


class ResultFile:
    """A file that grows by a line for each figure, so that an interrupted run keeps what it has."""

    def __init__(self, directory: Path, machine: str, header: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        facts = machine_facts()
        now = datetime.now(UTC)
        self.path = directory / f"{now:%Y-%m-%d}-{machine or slug_of(facts)}.jsonl"
        self.append({"run": now.isoformat(timespec="seconds"), "commit": commit(), "machine": facts, **header})

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the last line of each name in the files. An error counts only where there is nothing else."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "bench" in line and ("error" not in line or line["bench"] not in found):
                found[line["bench"]] = line
    return found
