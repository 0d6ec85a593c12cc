"""Generate ``gen/`` from ``protos/``; with ``--check`` only say whether what is committed differs."""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GEN = ROOT / "gen"


def generate(target: Path) -> None:
    """Write messages, services and typed stubs below ``target``. Proto package = Python package: nothing is patched."""
    target.mkdir(parents=True, exist_ok=True)
    outs = [f"--{plugin}_out={target}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # What google/ gives is in a package of its own, googleapis-common-protos.
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "maniple").rglob("*.proto"))
    # The plugins for typed stubs lie beside this interpreter, which need not be on PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}", *outs, *files]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})


def differences(fresh: Path, committed: Path) -> list[str]:
    """Name the generated files that are missing, stale or left over in ``committed``."""

    def listing(root: Path) -> set[Path]:
        # __init__.py and py.typed are written by hand.
        return {path.relative_to(root) for path in root.rglob("*_pb2*.py*") if "__pycache__" not in path.parts}

    wanted, present = listing(fresh), listing(committed)
    return sorted(
        [f"missing: {path}" for path in wanted - present]
        + [f"left over: {path}" for path in present - wanted]
        + [
            f"stale: {path}"
            for path in wanted & present
            if not filecmp.cmp(fresh / path, committed / path, shallow=False)
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if gen/ is not what protos/ give")
    if not parser.parse_args().check:
        generate(GEN)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        found = differences(Path(scratch), GEN)
    for line in found:
        print(line)
    if found:
        print("gen/ differs from protos/: run `make gen` and commit the result")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
