"""What an upgrade changes, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from rendering import CHART, Object, render

from support.platform_tools import helm

_FIXED = {"tls": {"workers": "secret", "workersSecret": {"worker": "w", "controlPlane": "c"}}}
# A StatefulSet refuses a change of anything else of its spec: such an upgrade fails half way.
_MAY_CHANGE = {
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
}


def _named(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def test_render_is_the_same_twice() -> None:
    assert render(_FIXED) == render(_FIXED)


def test_new_image_touches_pods_and_nothing_else() -> None:
    before, after = _named(render(_FIXED).objects), _named(render({**_FIXED, "image": {"tag": "9.9.9"}}).objects)
    assert before.keys() == after.keys()
    changed = {kind for (kind, name) in before if before[kind, name] != after[kind, name]}
    assert changed == {"Deployment", "StatefulSet", "Pod"}
    for kind, name in before:
        if kind == "StatefulSet":
            assert _frozen(before[kind, name]) == _frozen(after[kind, name])


@pytest.mark.parametrize(
    "values",
    [
        {"workers": {"tensorParallelSize": 4}},
        {"workers": {"device": "cuda"}},
        {"model": {"source": "pvc", "pvc": {"claimName": "m"}}},
        {"mesh": "istio"},
        {"commonLabels": {"team": "a"}},
        {"workers": {"updateStrategy": "OnDelete"}},
    ],
)
def test_no_value_changes_what_a_stateful_set_cannot_change(values: Object) -> None:
    [before] = render(_FIXED).of("StatefulSet")
    [after] = render({**_FIXED, **values}).of("StatefulSet")
    assert _frozen(before) == _frozen(after)
    assert before["spec"]["selector"] == after["spec"]["selector"]
    plane = [render({**_FIXED, **one}).one("Deployment", "r-maniple") for one in ({}, values)]
    assert plane[0]["spec"]["selector"] == plane[1]["spec"]["selector"]


def test_new_group_leaves_the_pods_of_others_alone() -> None:
    before = _named(render(_FIXED).objects)
    after = _named(render({**_FIXED, "groups": {"b": {}}}).objects)
    pods = ("StatefulSet", "r-maniple-main")
    assert before[pods]["spec"]["template"] == after[pods]["spec"]["template"]


def test_previous_version_of_the_chart_upgrades_to_a_sane_diff(tmp_path: Path) -> None:
    """From the last tag on; the first release is only packaged, and rendered as users get it."""
    previous = _previous(tmp_path)
    packaged = tmp_path / "packaged"
    done = helm(4).run("package", str(CHART), "--destination", str(packaged))
    assert done.returncode == 0, done.stderr
    [archive] = packaged.glob("*.tgz")
    with tarfile.open(archive) as held:
        names = {name.split("/", 1)[1] for name in held.getnames()}
    assert {"Chart.yaml", "values.yaml", "values.schema.json", "README.md"} <= names
    old = _named(_rendered(previous or archive))
    new = _named(_rendered(archive))
    for key in old.keys() & new.keys():
        if key[0] == "StatefulSet":
            assert _frozen(old[key]) == _frozen(new[key])
            assert old[key]["spec"]["selector"] == new[key]["spec"]["selector"]
        if key[0] == "Deployment":
            assert old[key]["spec"]["selector"] == new[key]["spec"]["selector"]
    assert {key for key in old if key[0] in ("StatefulSet", "Deployment", "Service")} <= new.keys()


def _frozen(one: Object) -> str:
    return json.dumps({key: value for key, value in one["spec"].items() if key not in _MAY_CHANGE}, sort_keys=True)


def _rendered(chart: Path) -> tuple[Object, ...]:
    done = helm(4).run("template", "r", str(chart), "--values", "-", stdin=json.dumps(_FIXED))
    assert done.returncode == 0, done.stderr
    return tuple(one for one in yaml.safe_load_all(done.stdout) if one)


def _previous(directory: Path) -> Path | None:
    root = CHART.parents[1]
    tags = ["git", "-C", str(root), "describe", "--tags", "--abbrev=0", "--match", "v*"]
    said = subprocess.run(tags, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        return None
    held = subprocess.run(
        ["git", "-C", str(root), "archive", said.stdout.strip(), "helm/maniple"], capture_output=True, check=True
    )
    (directory / "previous.tar").write_bytes(held.stdout)
    with tarfile.open(directory / "previous.tar") as archive:
        archive.extractall(directory / "previous", filter="data")
    return directory / "previous/helm/maniple"
