"""Real processes under load, and what Prometheus finds at them: every series that an alert or a panel asks for."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import promql_parser
import pytest
import yaml
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from control_plane.metrics.table import METRICS
from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from maniple.v1.inference_pb2 import GenerateRequest
from support.platform_tools import promtool
from support.ports import free_ports
from support.takeover import ControlPlane, Lost, Ready, StageProgress, prompt_of
from support.waiting import until
from support.worker_command import worker_processes
from worker_service.metrics import METRICS as WORKER_METRICS

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "helm/maniple/files"
WITHIN_S = 20.0
Found = dict[str, list[dict[str, str]]]


def found_at(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def series_of(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def value(text: str, name: str, **labels: str) -> float:
    """The sum of a metric over the labels that are not named."""
    return sum(number for one, of, number in series_of(text) if one == name and labels.items() <= of.items())


async def metrics_address(one: ControlPlane) -> str:
    await until(lambda: bool(one.events("metrics.listening")), "metrics", timeout_s=WITHIN_S)
    address: str = one.events("metrics.listening")[0]["address"]
    return address


def request(request_id: str, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=prompt_of(1)),
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        skip_text=True,
    )


async def load(one: ControlPlane, name: str) -> None:
    async with grpc.aio.insecure_channel(one.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def generate(request_id: str) -> None:
            async for _ in stub.Generate(request(request_id), timeout=WITHIN_S):
                pass

        await asyncio.gather(*(generate(f"{name}{number}") for number in range(6)))


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What was found: at an owner, a spare that relays, two ranks; at the spare after a takeover, and after a loss."""
    return asyncio.run(asyncio.wait_for(_scrapes(tmp_path_factory.mktemp("seen")), 90))


async def _scrapes(directory: Path) -> dict[str, str]:
    ports, [first_metrics, _] = free_ports(2, consecutive=True), free_ports(2, consecutive=True)
    [health] = free_ports(2, consecutive=True)[:1]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    flags = ("--metrics-listen", f"127.0.0.1:{first_metrics}", "--orphan-grace-s", "30")
    found: dict[str, str] = {}
    with ExitStack() as stack:
        workers = stack.enter_context(worker_processes(addresses[0], f"127.0.0.1:{health}", 2, *flags))

        def control_plane(name: str) -> ControlPlane:
            one = ControlPlane(name, directory, addresses, "--metrics-listen", "127.0.0.1:0")
            stack.callback(one.close)
            return one

        owner = control_plane("a")
        await owner.heard(Ready)
        spare = control_plane("b")
        await spare.heard(StageProgress, "wait")
        at_owner, at_spare = await metrics_address(owner), await metrics_address(spare)
        await load(owner, "direct")
        await load(spare, "relayed")
        async with grpc.aio.insecure_channel(owner.address) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            await admin.GetStatus(admin_pb2.GetStatusRequest())
            twice = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request("direct0"))
            with pytest.raises(grpc.aio.AioRpcError, match="finished less than a minute ago"):
                await twice.read()
            servers = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
            found["calls"] = str(sum(server.data.calls_started for server in servers.server))

        async def scrape(name: str, address: str) -> None:
            found[name] = await asyncio.to_thread(found_at, address)

        await scrape("owner", at_owner)
        await scrape("spare", at_spare)
        for rank in range(2):
            await scrape(f"rank {rank}", f"127.0.0.1:{first_metrics + rank}")
        owner.signal(signal.SIGKILL)
        await spare.heard(Ready)
        await load(spare, "adopted")
        await scrape("adopter", at_spare)
        workers.kill(1)
        await spare.heard(Lost)
        await scrape("lost", at_spare)
    return found


@pytest.fixture(scope="module")
def found(scrapes: dict[str, str]) -> Found:
    """The labels of every series, by its name."""
    by_name: Found = {}
    for where, text in scrapes.items():
        if where != "calls":
            for name, labels, _ in series_of(text):
                by_name.setdefault(name, []).append(labels)
    return by_name


def test_requests_and_takeover_and_loss_are_where_they_happened(scrapes: dict[str, str]) -> None:
    assert value(scrapes["owner"], "vllm:request_success_total", finished_reason="length") == 12
    assert value(scrapes["owner"], "vllm:generation_tokens_total") == 12 * 8
    assert value(scrapes["owner"], "maniple_refused_requests_total", error="DUPLICATE_REQUEST") == 1
    assert value(scrapes["owner"], "maniple_group_state", state="ready") == 1
    assert value(scrapes["owner"], "maniple_group_ranks") == 2
    method = "/maniple.v1.InferenceService/Generate"
    assert value(scrapes["spare"], "maniple_relayed_calls_total", method=method) == 6
    assert value(scrapes["spare"], "maniple_group_state", state="held") == 1
    assert (value(scrapes["spare"], "maniple_ready"), value(scrapes["spare"], "maniple_serving")) == (0, 1)
    assert value(scrapes["adopter"], "maniple_takeover_seconds_count") == 1
    assert value(scrapes["adopter"], "maniple_group_epoch") == 2
    assert value(scrapes["lost"], "maniple_group_losses_total") == 1
    assert value(scrapes["lost"], "maniple_serving") == 0
    assert int(scrapes["calls"]) > 12
    steps = value(scrapes["owner"], "maniple_group_step")
    for rank in ("0", "1"):
        text = scrapes[f"rank {rank}"]
        assert value(text, "maniple_worker_accepted_step", rank=rank) >= steps
        assert value(text, "maniple_worker_step_device_seconds_count", rank=rank) >= steps
        assert value(text, "maniple_worker_ready", rank=rank) == 1


def test_every_metric_is_found_and_none_that_no_table_has(found: Found) -> None:
    known = {**METRICS, **WORKER_METRICS}
    names = {name: metric for name, metric in known.items() if not metric.buckets}
    names |= {f"{name}_count": metric for name, metric in known.items() if metric.buckets}
    for name, metric in names.items():
        assert {frozenset(labels) for labels in found[name]} == {frozenset(metric.labels)}, name
    of_histograms = {f"{name}{end}" for name in known for end in ("_bucket", "_sum")}
    assert {name for name in found if not name.startswith("process_")} <= set(names) | of_histograms


@pytest.mark.parametrize("where", ["owner", "rank 0"])
def test_promtool_finds_nothing_wrong_but_the_colons_of_vllms_names(scrapes: dict[str, str], where: str) -> None:
    done = promtool().run("check", "metrics", stdin=scrapes[where])
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if line]
    # Names as vLLM has them, and what they cannot be without: abbreviations, and a histogram called total.
    allowed = re.compile(r"^vllm:\S+ (metric names should not contain ':'|.*\"_total\".*|.*_total.*)$")
    assert [line for line in complaints if not allowed.match(line)] == []


def expressions() -> dict[str, str]:
    """Of alerts and panels, as Prometheus gets them."""
    found: dict[str, str] = {}
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        found |= {f"alert {rule['alert']}": rule["expr"] for rule in group["rules"]}
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
            found[f"panel {panel['title']} {target['refId']}"] = expression
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Every selector in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str | int | float):
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


@pytest.mark.parametrize(("name", "expression"), expressions().items(), ids=lambda one: one if " " in one else "")
def test_every_series_that_is_asked_for_exists(found: Found, name: str, expression: str) -> None:
    asked = list(selectors(promql_parser.parse(expression)))
    assert len(asked) == len(re.findall(r"\b(?:maniple_|vllm:|process_)", expression)), name
    for selector in asked:
        matchers = selector.matchers.matchers
        of_name = found.get(selector.name, [])
        assert any(all(_matches(one, labels) for one in matchers) for labels in of_name), selector.prettify()


def _matches(matcher: Any, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name)
    if value is None:
        return False  # also where it is to differ: a label that nobody has is a mistake
    operation = str(matcher.op)
    fits = value == matcher.value if operation.endswith("Equal") else bool(re.fullmatch(matcher.value, value))
    return not fits if "Not" in operation else fits
