"""Run a real nginx with what docs/proxies/nginx.conf has."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from support.platform_tools import nginx
from support.ports import free_ports

RECOMMENDED = Path(__file__).resolve().parents[2] / "docs/proxies/nginx.conf"
_PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextmanager
def nginx_before(
    directory: Path, addresses: Sequence[str], *, changes: Mapping[str, str | None] | None = None
) -> Iterator[str]:
    """Yield where it listens. ``changes`` gives directives other values, everywhere; None leaves one out."""
    directory.mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    text = RECOMMENDED.read_text()
    servers = "\n".join(f"        server {one};" for one in addresses)
    text = _changed(text, r"^        server 127\.0\.0\.1:50051;$", servers)
    text = _changed(text, r"listen 8080 ", f"listen 127.0.0.1:{port} ")
    text = _changed(text, r"worker_processes auto;", "worker_processes 1;")
    for name, value in (changes or {}).items():
        text = _changed(text, rf"^( +){name} [^;]*;", rf"\g<1>{name} {value};" if value is not None else "")
    # Nothing of the system's: nobody need be root.
    own = "".join(f"    {name}_temp_path {directory}/{name};\n" for name in _PATHS) + "    access_log off;\n"
    text = _changed(text, r"^http \{\n", f"http {{\n{own}")
    path = directory / "nginx.conf"
    path.write_text(text)
    log = directory / "error.log"
    tool = nginx()
    words = ["-p", str(directory), "-c", str(path), "-e", str(log), "-g", f"daemon off; pid {directory}/pid;"]
    process = subprocess.Popen([str(tool.path), *words], env=dict(tool.env))
    try:
        address = f"127.0.0.1:{port}"
        with grpc.insecure_channel(address, [("grpc.max_reconnect_backoff_ms", 100)]) as channel:
            grpc.channel_ready_future(channel).result(10)
        assert process.poll() is None, log.read_text()
        yield address
    finally:
        process.terminate()
        process.wait(10)


def _changed(text: str, pattern: str, new: str) -> str:
    made, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    assert count, f"nginx.conf has no {pattern}"
    return made
