"""The stock gateway in front of a real server: OpenAI HTTP in, our tokens out."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from maniple_client import Client
from support.faults import model_with
from support.ports import free_ports
from support.scripted_reference import logits
from support.serve_process import serving

pytest.importorskip("smg", reason="the gateway's wheel exists for Linux only")

ANSWER = "Ave! 🦩 gradatim."
PATIENCE_S = 60.0


@contextmanager
def process(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        started = subprocess.Popen(command, stderr=output, start_new_session=True, **options)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        if started.stdout is not None:
            started.stdout.close()


def wait_for_server(server: subprocess.Popen[bytes], log: Path) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        said = json.loads(line)
        if said.get("event") == "ready":
            return str(said["address"])
    raise AssertionError(f"the server ended: {log.read_text()[-2000:]}")


def wait_for_gateway(gateway: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and gateway.poll() is None:
        try:
            status, _ = exchange(port, "GET", "/readiness")
            if status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the gateway is not ready: {log.read_text()[-2000:]}")


def launch_gateway(address: str, port: int, metrics_port: int, *more: str) -> list[str]:
    """Return the command that starts the gateway in front of a server."""
    launch = [sys.executable, "-m", "smg", "launch", "--worker-urls", f"grpc://{address}"]
    launch += ["--host", "127.0.0.1", "--port", str(port), "--shutdown-grace-period-secs", "1"]
    return [*launch, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), *more]


def exchange(port: int, method: str, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        headers = {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def gateway_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Where the gateway answers, and where it tells its metrics."""
    logs = tmp_path_factory.mktemp("gateway")
    model = f"scripted:{json.dumps({'forced': list(ANSWER.encode())})}"
    serve = [sys.executable, "-m", "control_plane.cli", "serve", "--model", model, "--listen", "127.0.0.1:0"]
    serve += ["--served-model-name", "maniple", "--announce", "json"]
    with process(serve, logs / "server", stdout=subprocess.PIPE) as server:
        address = wait_for_server(server, logs / "server")
        port, metrics_port = free_ports(2)
        launch = launch_gateway(address, port, metrics_port)
        with process(launch, logs / "gateway", stdout=subprocess.DEVNULL) as gateway:
            wait_for_gateway(gateway, port, logs / "gateway")
            yield port, metrics_port


@pytest.fixture(scope="module")
def gateway_port(gateway_ports: tuple[int, int]) -> int:
    return gateway_ports[0]


def lines_of(events: str) -> list[str]:
    """Return the lines that hold something. Text in them may hold what else Unicode counts as the end of a line."""
    return [line for line in events.split("\n") if line]


def chat(port: int, **options: object) -> str:
    body = {"model": "maniple", "messages": [{"role": "user", "content": "Salve?"}], **options}
    status, answer = exchange(port, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_gateway_answers_a_chat_completion(gateway_port: int) -> None:
    answer = json.loads(chat(gateway_port))
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["choices"][0]["finish_reason"] == "stop"
    # <|user|> Salve? <|end|> <|assistant|>, and the answer with its end of text, a byte a token.
    assert answer["usage"]["prompt_tokens"] == 3 + len("Salve?")
    assert answer["usage"]["completion_tokens"] == len(ANSWER.encode()) + 1


def test_gateway_streams_a_chat_completion(gateway_port: int) -> None:
    lines = [line.removeprefix("data: ") for line in lines_of(chat(gateway_port, stream=True))]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == ANSWER
    assert choices[-1]["finish_reason"] == "stop"


def test_gateway_passes_log_probabilities_on(gateway_port: int) -> None:
    answer = json.loads(chat(gateway_port, max_tokens=3, logprobs=True, top_logprobs=2))
    content = answer["choices"][0]["logprobs"]["content"]
    prompt = [257, *b"Salve?", 256, 258]
    for place, position in enumerate(content):
        scores = logits([*prompt, *ANSWER.encode()[:place]])
        total = math.log(sum(math.exp(score) for score in scores))
        assert position["token"] == ANSWER[place]
        assert position["logprob"] == pytest.approx(scores[ord(ANSWER[place])] - total, abs=1e-4)
        best = sorted(scores, reverse=True)[:2]
        assert [one["logprob"] for one in position["top_logprobs"]] == pytest.approx(
            [score - total for score in best], abs=1e-4
        )
    assert len(content) == 3


def test_gateway_streams_log_probabilities(gateway_port: int) -> None:
    lines = lines_of(chat(gateway_port, stream=True, max_tokens=4, logprobs=True, top_logprobs=1))
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [
        one
        for chunk in chunks
        for choice in chunk["choices"]
        for one in (choice.get("logprobs") or {}).get("content", [])
    ]
    assert "".join(one["token"] for one in told) == ANSWER[:4]
    assert all(one["logprob"] <= 0 for one in told)


def test_gateway_passes_the_length_on(gateway_port: int) -> None:
    answer = json.loads(chat(gateway_port, max_tokens=4))
    assert answer["choices"][0]["message"]["content"] == ANSWER[:4]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_gateway_completes_text_and_several_samples(gateway_port: int) -> None:
    body = {"model": "maniple", "prompt": "Salve?", "n": 2, "max_tokens": 4}
    status, answer = exchange(gateway_port, "POST", "/v1/completions", body)
    assert status == 200, answer
    assert [choice["text"] for choice in json.loads(answer)["choices"]] == [ANSWER[:4]] * 2


def test_gateway_stops_at_a_stop_string(gateway_port: int) -> None:
    answer = json.loads(chat(gateway_port, stop=["grad"]))
    assert answer["choices"][0]["message"]["content"] == "Ave! 🦩 "
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_bad_request_behind_the_gateway_is_the_clients_fault(gateway_port: int) -> None:
    body = {"model": "maniple", "messages": [{"role": "user", "content": "x"}], "stop_token_ids": [70000]}
    status, answer = exchange(gateway_port, "POST", "/v1/chat/completions", body)
    assert status == 400, answer
    assert "vocabulary" in answer
    assert ANSWER in json.loads(chat(gateway_port))["choices"][0]["message"]["content"]


def test_gateway_follows_the_prefix_cache_without_a_gap(gateway_ports: tuple[int, int]) -> None:
    port, metrics_port = gateway_ports

    def told() -> dict[str, int]:
        """What the gateway counts of the events it was told, as the gateway's own metrics have it."""
        counted: dict[str, int] = {}
        for line in exchange(metrics_port, "GET", "/metrics")[1].splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("smg_kv_event_"):
                kind = "".join(re.findall(r'(?:disposition|op|outcome|reason)=("\w+")', name)).replace('"', "")
                counted[f"{name.partition('{')[0].removeprefix('smg_kv_event_')} {kind}".strip()] = int(float(value))
        return counted

    for number in range(3):
        chat(port, messages=[{"role": "user", "content": f"{number} has some tokens more than a block"}])
    deadline = time.monotonic() + PATIENCE_S
    while (counted := told()).get("blocks_total stored", 0) < 6:
        assert time.monotonic() < deadline, counted
        time.sleep(0.05)
    assert counted["batches_total snapshot"] == counted["resyncs_total snapshot"] == 1
    assert counted["batches_total applied"] > 0
    wrong = ("gaps_total", "missed_batches_total", "parentless", "subscription_failures_total")
    assert not {name: count for name, count in counted.items() if name.startswith(wrong) and count}


def test_gateway_passes_a_json_schema_on(gateway_port: int) -> None:
    schema = {
        "type": "object",
        "properties": {"bird": {"enum": ["🦩", "corvus"]}, "count": {"type": "integer", "maximum": 9, "minimum": 1}},
        "required": ["bird", "count"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "bird", "schema": schema, "strict": True}}
    choice = json.loads(chat(gateway_port, response_format=wanted))["choices"][0]
    answer = json.loads(choice["message"]["content"])
    assert answer.keys() == {"bird", "count"}
    assert answer["bird"] in ("🦩", "corvus")
    assert choice["finish_reason"] == "stop"


@contextmanager
def streaming(port: int, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
    """Ask for a stream and yield it when it brings the first text; leaving early is what a client does that goes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    body = {"model": "maniple", "prompt": "Salve?", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: {")
        yield response
    finally:
        connection.close()


def test_client_that_goes_frees_its_request_and_a_drain_is_seen_while_streams_finish(tmp_path: Path) -> None:
    words = ("--model", model_with(step_time_s=0.005), "--served-model-name", "maniple")
    port, metrics_port = free_ports(2)
    often = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
    with serving(*words) as server, Client(server.address) as ours:
        launch = launch_gateway(server.address, port, metrics_port, *often)
        with process(launch, tmp_path / "gateway", stdout=subprocess.DEVNULL) as gateway:
            wait_for_gateway(gateway, port, tmp_path / "gateway")

            def load() -> int:
                (group,) = ours.status().groups
                return group.num_running + group.num_waiting

            with streaming(port, 3000):  # a quarter of a minute
                assert load() == 1
            gone_at = time.monotonic()
            while load():
                assert time.monotonic() - gone_at < 1.0
                time.sleep(0.01)

            with streaming(port, 800) as response:
                server.signal(signal.SIGTERM)
                deadline = time.monotonic() + PATIENCE_S
                while exchange(port, "GET", "/readiness")[0] == 200:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                assert load() == 1, "it was over before the gateway saw the drain"
                lines = lines_of(response.read().decode())
            assert lines[-1] == "data: [DONE]"
            choices = [one for line in lines[:-1] for one in json.loads(line.removeprefix("data: "))["choices"]]
            assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]
            assert server.exit_code() == 0
