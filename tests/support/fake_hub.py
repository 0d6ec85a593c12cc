"""A model hub of a few files on loopback, as far as its client looks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    def __init__(self, repository: str, files: Mapping[str, bytes], endpoint: str) -> None:
        self.repository = repository
        self.files = files
        self.endpoint = endpoint
        self.fetched: list[str] = []
        self.revisions: list[str] = []


@contextmanager
def fake_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[FakeHub]:
    """Serve one repository."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    hub = FakeHub(repository, files, f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = _handler(hub)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            api = f"/api/models/{hub.repository}"
            resolve = f"/{hub.repository}/resolve/{COMMIT}/"
            if path.startswith(f"{api}/tree/"):
                entries = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in hub.files.items()]
                self._send(200, json.dumps(entries).encode(), with_body, {})
            elif path == api or path.startswith(f"{api}/revision/"):
                hub.revisions.append(path.partition("/revision/")[2])
                siblings = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
                info = {"_id": "1", "id": hub.repository, "sha": COMMIT, "siblings": siblings, "private": False}
                self._send(200, json.dumps(info).encode(), with_body, {})
            elif path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
                name = path.removeprefix(resolve)
                content = hub.files[name]
                if with_body:
                    hub.fetched.append(name)
                headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                self._send(200, content, with_body, headers)
            else:
                error = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                self._send(404, b'{"error": "Repository not found"}', with_body, error)

        def _send(self, status: int, body: bytes, with_body: bool, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
