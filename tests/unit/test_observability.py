"""Metrics and spans: what is asked for and refused, what is held together with the docs, what a hanging loop gives."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane import span_export
from control_plane.assembly import observed_engine
from control_plane.config import ControlPlaneConfig, load_config, resolve_auto
from control_plane.engine import Engine
from control_plane.group.loss import LossKind, LossReason
from control_plane.group.watchdog import BusyState, GroupState, RankState, StepState, verdict
from control_plane.metered_engine import MeteredEngine
from control_plane.metrics.loss_causes import CAUSES, cause_of
from control_plane.metrics.table import METRICS
from control_plane.traced_engine import TracedEngine
from service_chassis import metrics_server
from service_chassis.errors import ConfigurationError
from service_chassis.metrics import COUNTER, GAUGE, HISTOGRAM, Board, Metric, Reading, by_name
from service_chassis.metrics_server import MetricsServer
from service_chassis.telemetry import trace_id_of
from worker_service.config import read_config
from worker_service.metrics import METRICS as WORKER_METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/observability.md"


def faults_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        ControlPlaneConfig(**values)
    return [field for field, _, _ in caught.value.faults]


@pytest.mark.parametrize("address", ["nowhere", "unix:/run/m.sock", "a:65536", ":9090", "a:b"])
def test_metrics_are_served_at_a_port_or_nowhere(address: str) -> None:
    assert faults_of({"metrics_listen": address}) == ["metrics_listen"]


def test_metrics_take_no_other_servers_port() -> None:
    assert faults_of({"metrics_listen": "127.0.0.1:7", "listen": "127.0.0.1:7"}) == ["metrics_listen"]
    assert faults_of({"metrics_listen": "127.0.0.1:8000", "openai_port": 8000}) == ["metrics_listen"]
    ControlPlaneConfig(metrics_listen="127.0.0.1:0", listen="127.0.0.1:0")


@pytest.mark.parametrize(
    "words",
    [
        "--metrics-listen nowhere",
        "--listen 127.0.0.1:7 --metrics-listen 0.0.0.0:8",
        "--probe-listen 0.0.0.0:9000 --metrics-listen 0.0.0.0:9000",
        "--tensor-parallel-size 2 --metrics-listen a:0",
        "--tensor-parallel-size 2 --metrics-listen a:65535",
        "--tensor-parallel-size 2 --probe-listen a:9001 --metrics-listen a:9000",
    ],
)
def test_ports_of_ranks_for_metrics_are_their_own(words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(words.split(), {})
    assert [field for field, _, _ in caught.value.faults] == ["metrics_listen"]


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://", "ftp://a:1", "http://a b:1", "http://a:1/v1/traces"])
def test_endpoint_that_is_no_url_of_a_host_is_refused(endpoint: str) -> None:
    assert faults_of({"otlp_endpoint": endpoint}) == ["otlp_endpoint"]


def test_endpoint_of_the_standard_variable_holds_unless_ours_says_otherwise() -> None:
    standard = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}
    assert load_config({}, standard).otlp_endpoint == "http://a:4317"
    assert load_config({}, {**standard, "MANIPLE_OTLP_ENDPOINT": "https://b"}).otlp_endpoint == "https://b"
    assert load_config({"otlp_endpoint": ""}, standard).otlp_endpoint == ""
    assert load_config({}, {}).otlp_endpoint == ""


def test_what_is_not_installed_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "is_installed", lambda: False)
    monkeypatch.setattr(span_export, "is_installed", lambda: False)
    config = ControlPlaneConfig(model="scripted", metrics_listen="127.0.0.1:0", otlp_endpoint="http://a:1")
    with pytest.raises(ConfigurationError) as caught:
        resolve_auto(config, has_gpu=False, on_terminal=False)
    with pytest.raises(ConfigurationError) as of_worker:
        read_config(["--metrics-listen", "127.0.0.1:0"], {})
    assert [field for field, _, _ in caught.value.faults] == ["metrics_listen", "otlp_endpoint"]
    for _, _, rule in [*caught.value.faults, *of_worker.value.faults]:
        assert "pip install 'maniple[observability]'" in rule


def test_engine_that_nobody_watches_is_the_plain_one() -> None:
    assert observed_engine(trace=None, meters=None, spans=None) is Engine
    made: Any = observed_engine(trace=object(), meters=object(), spans=None)  # type: ignore[arg-type]
    assert list(made.func.__mro__[1:4]) == [TracedEngine, MeteredEngine, Engine]
    assert set(made.keywords) == {"trace", "meters"}


def state(**rank: Any) -> GroupState:
    ranks = [RankState(0, heard_steps_at=100.0, heard_health_at=100.0, **rank), RankState(1)]  # type: ignore[arg-type]
    return GroupState(ranks=ranks, heartbeat_timeout_s=5.0, step_timeout_s=10.0, ticked_at=100.0)


def with_step(of: GroupState, **step: float) -> GroupState:
    of.oldest = StepState(**{"step": 7, "sent_at": 100.0, "budget_s": 10.0, **step})  # type: ignore[arg-type]
    return of


@pytest.mark.parametrize(
    ("cause", "judged", "now"),
    [
        ("exited", state(exited="exited: killed by SIGKILL"), 100.0),
        ("failed", state(failed="failed in step 3: RuntimeError: no"), 100.0),
        ("restarted", state(restarted="restarted: another incarnation answers in its place"), 100.0),
        ("diverged", state(diverged="diverged: its state digest after step 3 is 1, not 2"), 100.0),
        ("collective", state(left_alone="failed: BrokenCollective: no", left_alone_at=90.0), 100.0),
        ("silent", state(), 106.0),
        ("overdue", state(busy=BusyState("load", 11.0, 10.0)), 100.0),
        ("stuck", with_step(state(accepted=7, running_step=7, running_for_s=11.0)), 100.0),
        ("stuck", with_step(state(), sent_at=80.0), 100.0),
    ],
)
def test_verdict_of_the_watchdog_is_sorted_by_its_cause(cause: str, judged: GroupState, now: float) -> None:
    if cause == "stuck" and judged.ranks[0].accepted:
        judged.ranks[1].accepted, judged.ranks[1].running_step, judged.ranks[1].running_for_s = 7, 7, 11.0
    judgement = verdict(now, judged)
    assert cause_of(LossReason(judgement.rank, str(judgement))) == cause
    assert cause in CAUSES


def test_loss_to_another_owner_is_no_fault_of_a_rank() -> None:
    for kind in (LossKind.FENCED, LossKind.UNPROVEN):
        assert cause_of(LossReason(None, "rank 1 exited: x", kind)) == kind.value
    assert cause_of(LossReason(None, "the control plane failed: KeyError")) == "other"


def documented() -> dict[str, tuple[str, str]]:
    """Kind and labels of every metric in the page's tables."""
    rows = re.findall(r"^\| `([a-z0-9_:]+)` \| (counter|gauge|histogram) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (kind, labels) for name, kind, labels in rows}


def test_page_has_every_metric_with_its_kind_and_labels() -> None:
    def labels(metric: Metric) -> str:
        is_of_group = metric.labels[:2] == ("model_name", "engine")  # said once for all of these
        return ", ".join(f"`{one}`" for one in (metric.labels[2:] if is_of_group else metric.labels))

    known = {name: (metric.kind, labels(metric)) for name, metric in {**METRICS, **WORKER_METRICS}.items()}
    assert documented() == known


def test_page_says_of_every_alert_what_to_do() -> None:
    alerts = yaml.safe_load((ROOT / "helm/maniple/files/alerts.yaml").read_text())["groups"][0]["rules"]
    said = re.findall(r"^\| `(Maniple\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert said == [one["alert"] for one in alerts]


def test_distribution_counts_each_value_up_to_its_bound() -> None:
    board = Board(by_name([Metric("h", HISTOGRAM, "t", (), (1.0, 2.0)), Metric("c", COUNTER, "t", ("l",))]))
    for value, times in ((0.5, 1), (1.0, 1), (1.5, 3), (9.0, 1)):
        board.distribution("h").observe(value, times)
    board.count("c", "x").add(2)
    board.count("c", "y")
    assert board.readings() == [
        Reading("c", ("x",), 2),
        Reading("c", ("y",), 0),
        Reading("h", (), board.distribution("h").spread()),
    ]
    assert board.distribution("h").spread() == ((2, 5, 6), 0.5 + 1 + 4.5 + 9)


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", ""),
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", ""),
        ("", ""),
    ],
)
def test_id_of_a_trace_is_read_from_what_the_client_sent(traceparent: str, trace_id: str) -> None:
    assert trace_id_of(traceparent) == trace_id


GAUGES = by_name([Metric("g", GAUGE, "t")])


def fetched(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


async def test_scrape_reads_on_the_loop_and_fails_while_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_ANSWER_WITHIN_S", 0.2)
    loop = asyncio.get_running_loop()

    def read() -> list[Reading]:
        assert asyncio.get_running_loop() is loop
        return [Reading("g", (), 5)]

    server = MetricsServer(GAUGES, read, loop, "127.0.0.1:0")
    try:
        status, text = await asyncio.to_thread(fetched, server.address)
        assert (status, "g 5.0" in text.splitlines()) == (200, True)
        hanging = loop.run_in_executor(None, fetched, server.address)
        time.sleep(0.6)  # noqa: ASYNC251 - the loop does nothing else
        assert (await hanging)[0] == 500
        assert (await asyncio.to_thread(fetched, server.address))[0] == 200
        with pytest.raises(ConfigurationError, match="in use"):
            MetricsServer(GAUGES, read, loop, server.address)
    finally:
        await asyncio.to_thread(server.stop)
    with pytest.raises(OSError):
        socket.create_connection(server.address.split(":"), timeout=1)  # type: ignore[arg-type]
