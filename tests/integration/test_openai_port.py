"""``maniple serve --openai-port``: the gateway comes with the server, comes back when it dies, and goes with it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control_plane import openai_gateway
from control_plane.announcement import OpenAiReady, Ready
from control_plane.config import ControlPlaneConfig, resolve_auto
from service_chassis.errors import ConfigurationError
from support.faults import is_alive
from support.ports import free_ports
from support.serve_process import ServeProcess, serving

pytest.importorskip("smg", reason="the gateway's wheel exists for Linux only")

ANSWER = "Ave! 🦩"
MODEL = f"scripted:{json.dumps({'forced': list(ANSWER.encode())})}"


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    host = url.removeprefix("http://").removesuffix("/v1")
    connection = http.client.HTTPConnection(host, timeout=30)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith("{") else text
    finally:
        connection.close()


def answer(url: str) -> str:
    body = {"model": "maniple", "messages": [{"role": "user", "content": "Salve?"}]}
    status, said = post(url, "/v1/chat/completions", body)
    assert status == 200, said
    return str(said["choices"][0]["message"]["content"])


def until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for: {what}"
        time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[ServeProcess]:
    words = ("--model", MODEL, "--served-model-name", "maniple", "--openai-port", str(free_ports(1)[0]))
    with serving(*words) as one:
        yield one


def test_gateway_serves_openai_clients_comes_back_and_goes_with_the_server(server: ServeProcess) -> None:
    ready = server.hear(OpenAiReady)
    assert answer(ready.url) == ANSWER
    status, said = post(ready.url, "/v1/embeddings", {"model": "maniple", "input": "Salve?"})
    assert status == 200, said
    vector = said["data"][0]["embedding"]
    assert sum(x * x for x in vector) == pytest.approx(1.0, abs=1e-5)
    assert said["usage"]["prompt_tokens"] == len("Salve?")
    # Who may generate may not register a server of his own.
    assert post(ready.url, "/workers", {"url": "grpc://127.0.0.1:1"})[0] in (401, 403)
    os.kill(ready.pid, signal.SIGKILL)
    again = server.hear(OpenAiReady, 2)
    assert (again.url, again.pid != ready.pid) == (ready.url, True)
    assert answer(again.url) == ANSWER
    assert len(server.heard(Ready)) == 1, "nobody else noticed"
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert not is_alive(again.pid)


def test_gateway_is_gone_when_the_server_was_killed(server: ServeProcess) -> None:
    pid = server.hear(OpenAiReady).pid
    server.signal(signal.SIGKILL)
    until(lambda: not is_alive(pid), "the gateway is gone")


def test_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = ServeProcess(("--model", "scripted", "--openai-port", str(port)))
        assert one.exit_code() == 2
        assert one.announced == []


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"listen": "unix:/tmp/x"}, "needs --listen HOST:PORT"),
        ({"listen": "127.0.0.1:8000"}, "must differ from the port of --listen"),
        ({"tls_certificate": "c", "tls_key": "k"}, "must be 0 with TLS or authentication"),
        ({"auth_callers": "f"}, "must be 0 with TLS or authentication"),
    ],
)
def test_what_the_gateway_cannot_reach_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ControlPlaneConfig(model="scripted", openai_port=8000, **settings)
    assert [fault for fault in caught.value.faults if fault[0] == "openai_port" and rule in fault[2]]


def test_missing_gateway_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_gateway, "is_installed", lambda: False)
    with pytest.raises(ConfigurationError) as caught:
        resolve_auto(ControlPlaneConfig(model="scripted", openai_port=8000), has_gpu=False, on_terminal=False)
    assert caught.value.faults == [("openai_port", 8000, "needs the gateway smg: pip install 'maniple[openai]'")]
