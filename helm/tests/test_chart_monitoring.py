"""Alerts and dashboard: what the chart renders of them is what was tested."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from rendering import CHART, render

from support.platform_tools import promtool

FILES = CHART / "files"
CASES = Path(__file__).with_name("alerts.test.yaml")


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    done = promtool().run("test", "rules", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_is_without_a_case_of_both_kinds() -> None:
    alerts = {rule["alert"] for group in _alerts()["groups"] for rule in group["rules"]}
    fires: set[str] = set()
    keeps_still: set[str] = set()
    for test in yaml.safe_load(CASES.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else keeps_still).add(case["alertname"])
    assert fires == keeps_still == alerts


def test_rules_of_the_chart_are_the_tested_ones() -> None:
    values = {"monitoring": {"rules": True, "labels": {"release": "prometheus"}}}
    [rule] = render(values).of("PrometheusRule")
    assert rule["spec"] == _alerts()
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert render({}).of("PrometheusRule") == []


def test_dashboard_of_the_chart_is_the_file() -> None:
    [shown] = [
        one
        for one in render({"monitoring": {"dashboard": True}}).of("ConfigMap")
        if one["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    assert json.loads(shown["data"]["maniple.json"]) == json.loads((FILES / "dashboard.json").read_text())


def test_panels_lie_beside_each_other() -> None:
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def _alerts() -> dict[str, list[dict[str, list[dict[str, str]]]]]:
    found: dict[str, list[dict[str, list[dict[str, str]]]]] = yaml.safe_load((FILES / "alerts.yaml").read_text())
    return found
