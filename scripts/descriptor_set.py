"""Write what the contracts of clients say of themselves, as proxies read it that turn JSON into calls."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Errors carry details of google.rpc, which no message of ours names: a proxy that does not know them shows none.
FILES = ("maniple/v1/inference.proto", "google/rpc/error_details.proto")


def write(target: Path) -> None:
    """Write a FileDescriptorSet of the files and all that they import."""
    target.parent.mkdir(parents=True, exist_ok=True)
    roots = [f"--proto_path={ROOT / one}" for one in ("protos", "clients/third_party")]
    out = ["--include_imports", f"--descriptor_set_out={target}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *roots, *out, *FILES], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", default=ROOT / "build/maniple.binpb", help="the file to write")
    write(parser.parse_args().target)
