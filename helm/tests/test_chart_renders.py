"""Every values file in ci/ renders, with helm 3 and 4, into objects that Kubernetes and its extensions accept."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.istio.networking import v1 as istio_networking
from cloudcoil.models.istio.security import v1 as istio_security
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as monitoring
from rendering import CHART, CI_FILES, MAJORS, render

from support.platform_tools import helm

VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
# Without API groups of extensions, which have models of their own below.
_BUILT_IN = ("v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1")
_EXTENSIONS = {
    "networking.istio.io/v1": istio_networking,
    "security.istio.io/v1": istio_security,
    "monitoring.coreos.com/v1": monitoring,
    "keda.sh/v1alpha1": keda,
}
_SCHEMAS = Path(__file__).parent / "schemas"
_BY_SCHEMA = {
    "leaderworkerset.x-k8s.io/v1": "leaderworkerset.json",
    "cert-manager.io/v1": "certificate.json",
    "gateway.networking.k8s.io/v1": "grpcroute.json",
}
each_file = pytest.mark.parametrize("file", CI_FILES, ids=lambda file: file.stem.removesuffix("-values"))


@pytest.mark.parametrize("major", MAJORS)
@each_file
def test_ci_values_pass_lint(file: Path, major: int) -> None:
    done = helm(major).run("lint", "--strict", str(CHART), "--values", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@each_file
def test_both_majors_of_helm_render_the_same(file: Path) -> None:
    three, four = (render(_without_drawn(file), major=major) for major in MAJORS)
    assert three == four
    assert three.objects


@each_file
def test_every_object_is_one_that_its_api_knows(file: Path) -> None:
    for one in render(file).objects:
        version = one["apiVersion"]
        if version in _BUILT_IN:
            for release in _versions(one):
                kubernetes_validate.validate(one, release, strict=True)
        elif version in _EXTENSIONS:
            model = getattr(_EXTENSIONS[version], one["kind"])
            told = model.model_validate(one).model_dump(mode="json", by_alias=True, exclude_none=True)
            assert _unknown(one, told) == [], one["kind"]
        else:
            schema = json.loads((_SCHEMAS / _BY_SCHEMA[version]).read_text())
            jsonschema.validate(one, schema, cls=jsonschema.Draft202012Validator)


@each_file
def test_pods_of_a_leader_worker_set_are_pods(file: Path) -> None:
    for owner, pod in render(file).pods():
        if owner["kind"] == "LeaderWorkerSet":
            lifted = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x", **pod["metadata"]},
                "spec": pod["spec"],
            }
            for release in VERSIONS:
                kubernetes_validate.validate(lifted, release, strict=True)


def test_every_value_is_in_the_schema_and_in_few_lines() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(text), schema)
    assert len(text.splitlines()) <= 130
    assert _open_objects(schema) <= {"affinity", "global"}


def test_readme_has_every_value() -> None:
    script = CHART.parents[1] / "scripts/chart_readme.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _versions(one: dict[str, Any]) -> tuple[str, ...]:
    """All, but for what younger versions brought: image volumes and device claims."""
    said = json.dumps(one)
    if '"resourceClaims"' in said and '"resourceClaimTemplateName"' in said:
        return VERSIONS[VERSIONS.index("1.31") :]
    return VERSIONS[VERSIONS.index("1.31") :] if '"image": {"reference"' in said else VERSIONS


def _unknown(given: Any, told: Any, path: str = "") -> list[str]:
    """What a model dropped without a word."""
    if isinstance(given, dict) and isinstance(told, dict):
        lost = [f"{path}.{key}" for key in given if key not in told and given[key] not in (None, {}, [])]
        return lost + [
            word for key in given if key in told for word in _unknown(given[key], told[key], f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(told, list):
        return list(itertools.chain(*(_unknown(a, b, f"{path}[]") for a, b in zip(given, told, strict=True))))
    return []


def _open_objects(schema: Any, name: str = "") -> set[str]:
    """The names of objects in which a misspelt key would pass."""
    if isinstance(schema, list):
        return set().union(*(_open_objects(one, name) for one in schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    found = set()
    if schema.get("type") == "object" and "additionalProperties" not in schema and name != "items":
        found.add(name)
    for key, value in schema.items():
        if key == "properties":
            for prop, inner in value.items():
                found |= _open_objects(inner, prop)
        elif key in ("oneOf", "additionalProperties", "items"):
            found |= _open_objects(value, "items" if key == "items" else name)
    return found


def _without_drawn(file: Path) -> dict[str, Any]:
    """Values that draw no certificate, which would differ each time."""
    values: dict[str, Any] = yaml.safe_load(file.read_text()) or {}
    tls = values.setdefault("tls", {})
    if tls.get("workers", "generate") == "generate":
        tls |= {"workers": "secret", "workersSecret": {"worker": "w", "controlPlane": "c"}}
    return values
