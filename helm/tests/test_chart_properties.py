"""What must hold of every render, whatever the values: each rule is somebody's broken night."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from rendering import CHART, CI_FILES, Object, Refused, Rendered, env, render

_UNITS = {"Mi": 1, "Gi": 1024, "Ti": 1024 * 1024}


def mebibytes(size: str) -> int:
    return int(size[:-2]) * _UNITS[size[-2:]]


@some.composite
def values(draw: some.DrawFn) -> dict[str, Any]:
    """Values that a person might write, most of them unusual."""
    nodes = draw(some.sampled_from([1, 1, 1, 2, 4]))
    here = draw(some.integers(1, 8))
    device = draw(some.sampled_from(["cpu", "cuda"]))
    names = draw(some.lists(some.sampled_from(["a", "b", "long-name-of-a-group", "z9"]), unique=True, max_size=3))
    mesh = draw(some.sampled_from(["none", "istio", "linkerd"]))
    clients = draw(some.sampled_from(["", "front"]))
    return {
        "groups": {name: {"orphanGraceSeconds": draw(some.integers(0, 600))} for name in names},
        "workers": {
            "device": device,
            "tensorParallelSize": nodes * here,
            "nodes": nodes,
            "resources": {"memory": draw(some.sampled_from(["512Mi", "4Gi", "2Ti"]))},
            "shm": draw(some.sampled_from(["64Mi", "16Gi"])),
        },
        "controlPlane": {
            "spares": draw(some.integers(0, 3)),
            "maxGroups": draw(some.integers(1, 3)),
            "drainSeconds": draw(some.integers(1, 3600)),
            "preStopSeconds": draw(some.integers(0, 60)),
            "autoscaling": {
                "enabled": draw(some.booleans()),
                "prometheus": draw(some.sampled_from(["", "http://p:9090"])),
            },
        },
        "model": draw(
            some.sampled_from(
                [
                    {"source": "demo"},
                    {"source": "hub", "hub": {"id": "org/Model-7B", "tokenSecret": {"name": "t"}}},
                    {"source": "pvc", "pvc": {"claimName": "models", "path": "a/b"}},
                    {"source": "image", "image": {"reference": "r/x:1"}},
                ]
            )
        ),
        "startupSeconds": draw(some.integers(30, 7200)),
        "probes": {
            "periodSeconds": draw(some.integers(1, 60)),
            "timeoutSeconds": draw(some.integers(5, 30)),
        },
        "tls": {"workers": draw(some.sampled_from(["generate", "none"])), "clientsSecret": clients},
        "auth": {"callersSecret": "c", "relayTokenSecret": "r"} if clients and draw(some.booleans()) else {},
        "mesh": mesh,
        "openai": {"enabled": not clients and draw(some.booleans())},
        "monitoring": {"serviceMonitor": draw(some.booleans())},
    }


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(values())
def test_rules_hold_for_random_values(given_values: dict[str, Any]) -> None:
    rendered = render(given_values)
    merged = {**yaml.safe_load((CHART / "values.yaml").read_text()), **given_values}
    check(rendered, merged)


@pytest.mark.parametrize("file", CI_FILES, ids=lambda file: file.stem)
def test_rules_hold_for_ci_values(file: Any) -> None:
    given_values = yaml.safe_load(file.read_text()) or {}
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    check(render(file), {key: _merge(defaults[key], given_values.get(key)) for key in defaults})


def _merge(base: Any, own: Any) -> Any:
    if isinstance(base, dict) and isinstance(own, dict):
        removed = {key for key in own if own[key] is None}
        return {key: None if key in removed else _merge(base.get(key), own.get(key)) for key in base | own}
    return base if own is None else own


def check(rendered: Rendered, merged: dict[str, Any]) -> None:
    for owner, pod, container in rendered.containers():
        _container_is_restricted(pod, container)
        _probes_are_sound(container, merged)
        _ports_are_named(container)
        assert "$(" not in json.dumps(container.get("args", [])), owner
    for _, pod in rendered.pods():
        _annotated_ports_are_single(pod)
        assert pod["spec"]["automountServiceAccountToken"] is False
    _workers(rendered, merged)
    _control_plane(rendered, merged)
    _services(rendered, merged)
    _policies(rendered)


def _container_is_restricted(pod: Object, container: Object) -> None:
    own, all_of_them = container["securityContext"], pod["spec"]["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all_of_them["runAsNonRoot"] is True
    assert all_of_them["runAsUser"] > 0
    assert all_of_them["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "memory" in container["resources"]["limits"]
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted <= {volume["name"] for volume in pod["spec"].get("volumes", [])}


def _probes_are_sound(container: Object, merged: dict[str, Any]) -> None:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(name)
        if probe is None:
            continue
        assert "tcpSocket" not in probe
        assert probe["timeoutSeconds"] >= 5
        if "grpc" in probe:  # by number; the port must be there, and be the one in plaintext
            ports = {port["containerPort"]: port["name"] for port in container["ports"]}
            assert ports[probe["grpc"]["port"]].startswith("grpc-probe")
        if name == "startupProbe":
            assert probe["failureThreshold"] * probe["periodSeconds"] >= merged["startupSeconds"]


def _ports_are_named(container: Object) -> None:
    ports = container.get("ports", [])
    for port in ports:
        assert re.fullmatch(r"(grpc|http)(-[a-z0-9-]+)?", port["name"]), port
        assert len(port["name"]) <= 15
    assert len({port["name"] for port in ports}) == len(ports)
    assert len({port["containerPort"] for port in ports}) == len(ports)


def _annotated_ports_are_single(pod: Object) -> None:
    for key, value in pod["metadata"].get("annotations", {}).items():
        if key.endswith(("Ports", "-ports")):
            assert all(re.fullmatch(r"[0-9]+", port) for port in value.split(",") if value), (key, value)


def _workers(rendered: Rendered, merged: dict[str, Any]) -> None:
    groups = {name: {**merged["workers"], **(own or {})} for name, own in merged["groups"].items() if own is not None}
    if "main" not in merged["groups"]:
        groups["main"] = merged["workers"]
    owners = [*rendered.of("StatefulSet"), *rendered.of("LeaderWorkerSet")]
    assert len(owners) == len(groups)
    for owner, pod, container in rendered.containers():
        if container["name"] != "worker":
            continue
        group = groups[owner["metadata"]["labels"]["maniple.io/group"]]
        here = group["tensorParallelSize"] // group["nodes"]
        limits = container["resources"]["limits"]
        shm = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
        memory = merged["workers"]["resources"].get("memory") or "4Gi"
        if here > 1:
            assert shm[0]["emptyDir"]["medium"] == "Memory"
            assert mebibytes(limits["memory"]) == mebibytes(memory) + mebibytes(shm[0]["emptyDir"]["sizeLimit"])
        else:
            assert not shm
            assert mebibytes(limits["memory"]) == mebibytes(memory)
        if group["device"] == "cuda" and not group.get("resourceClaims"):
            assert limits["nvidia.com/gpu"] == str(here)
        else:
            assert "nvidia.com/gpu" not in limits
        said = env(container)
        assert int(said["MANIPLE_WORKER_TENSOR_PARALLEL_SIZE"]) == here
        assert int(said["MANIPLE_WORKER_WORLD_SIZE"]) == group["tensorParallelSize"]
        assert len([port for port in container["ports"] if port["name"].startswith("grpc-rank")]) == here
        _grows_by_no_surge(owner)


def _grows_by_no_surge(owner: Object) -> None:
    said = json.dumps(owner["spec"])
    assert owner["spec"]["replicas"] == 1
    if owner["kind"] == "LeaderWorkerSet":
        assert owner["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"] == 0
    else:
        assert "maxSurge" not in said
        assert owner["spec"]["updateStrategy"]["type"] in ("RollingUpdate", "OnDelete")


def _control_plane(rendered: Rendered, merged: dict[str, Any]) -> None:
    plane = merged["controlPlane"]
    [deployment] = [one for one in rendered.of("Deployment") if one["metadata"]["name"] == "r-maniple"]
    spec = deployment["spec"]["template"]["spec"]
    drain, before = plane.get("drainSeconds", 60), plane.get("preStopSeconds", 5)
    assert spec["terminationGracePeriodSeconds"] > drain + before
    said = env(spec["containers"][0])
    assert int(said["MANIPLE_DRAIN_TIMEOUT_S"]) == drain
    assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(before)]
    num_groups = len(said["MANIPLE_WORKER_ADDRESSES"].split(";"))
    needed = -(-num_groups // int(said["MANIPLE_MAX_GROUPS"]))
    if plane.get("autoscaling", {}).get("enabled"):
        assert "replicas" not in deployment["spec"]
        [scaler] = [*rendered.of("HorizontalPodAutoscaler"), *rendered.of("ScaledObject")]
        spec = scaler["spec"]
        least = spec.get("minReplicas", spec.get("minReplicaCount"))
        assert least >= needed
        assert spec.get("maxReplicas", spec.get("maxReplicaCount")) >= least
    else:
        assert deployment["spec"]["replicas"] == needed + plane.get("spares", 1)
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 1}


def _services(rendered: Rendered, merged: dict[str, Any]) -> None:
    wanted = {"istio": "grpc", "linkerd": "kubernetes.io/h2c", "none": None}[merged["mesh"]]
    for service in rendered.of("Service"):
        for port in service["spec"]["ports"]:
            if port["name"].startswith("grpc"):
                assert port.get("appProtocol") == wanted
    heads = {one["spec"]["selector"].get("maniple.io/group"): one for one in rendered.of("Service")}
    for owner in rendered.of("StatefulSet"):
        service = heads[owner["metadata"]["labels"]["maniple.io/group"]]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["metadata"]["name"] == owner["spec"]["serviceName"]


def _policies(rendered: Rendered) -> None:
    """Every port of every pod is in some policy, and workers admit control planes alone to what commands them."""
    policies = rendered.of("NetworkPolicy")
    for owner, pod in rendered.pods():
        if owner["kind"] == "Pod":
            continue
        labels = pod["metadata"]["labels"].items()
        own = [one for one in policies if one["spec"]["podSelector"]["matchLabels"].items() <= labels]
        assert len(own) == 1, owner["metadata"]["name"]
        allowed: set[int | str] = set()
        for rule in own[0]["spec"]["ingress"]:
            for port in rule.get("ports", []):
                last = port.get("endPort", port["port"])
                allowed |= {port["port"]} if isinstance(port["port"], str) else set(range(port["port"], last + 1))
        for container in pod["spec"]["containers"]:
            for port in container["ports"]:
                assert {port["name"], port["containerPort"]} & allowed, port


def test_group_taken_away_and_others_added() -> None:
    rendered = render({"groups": {"main": None, "a": {}, "b": {}}})
    assert {one["metadata"]["name"] for one in rendered.of("StatefulSet")} == {"r-maniple-a", "r-maniple-b"}
    [deployment] = rendered.of("Deployment")
    assert deployment["spec"]["replicas"] == 3
    said = env(deployment["spec"]["template"]["spec"]["containers"][0])
    assert said["MANIPLE_WORKER_ADDRESSES"] == "dns:///r-maniple-a.llm.svc:50061;dns:///r-maniple-b.llm.svc:50061"
    assert {one["spec"]["updateStrategy"]["type"] for one in rendered.of("StatefulSet")} == {"OnDelete"}


@pytest.mark.parametrize(
    ("given_values", "words"),
    [
        ({"workers": {"tensorParalelSize": 2}}, ["tensorParalelSize"]),
        ({"model": {"source": "disk"}}, ["source"]),
        ({"model": {"source": "hub"}}, ["model.hub.id: must name a repository"]),
        ({"model": {"source": "pvc"}}, ["model.pvc.claimName: must name"]),
        ({"model": {"source": "pvc", "pvc": {"claimName": "m", "path": "../etc"}}}, ["path"]),
        ({"probes": {"timeoutSeconds": 1}}, ["timeoutSeconds"]),
        ({"workers": {"resources": {"memory": "4G"}}}, ["memory"]),
        ({"groups": {"b": {"tensorParallelSize": 2}}}, ["groups.main.tensorParallelSize=1: must be 2"]),
        ({"groups": {"Upper": {}}}, ["Upper"]),
        ({"groups": {"main": None}}, ["groups: must have at least one"]),
        ({"workers": {"nodes": 3, "tensorParallelSize": 4}}, ["nodes=3: must divide tensorParallelSize=4"]),
        ({"tls": {"workers": "none"}, "networkPolicy": {"enabled": False}}, ["tls.workers=none: needs mesh or"]),
        ({"tls": {"workers": "certManager"}}, ["tls.issuerRef: must name an issuer"]),
        ({"tls": {"workers": "secret"}}, ["tls.workersSecret"]),
        ({"auth": {"callersSecret": "c"}}, ["auth.relayTokenSecret: must be given"]),
        ({"auth": {"callersSecret": "c", "relayTokenSecret": "r"}}, ["tokens never travel in plaintext"]),
        ({"openai": {"enabled": True}, "tls": {"clientsSecret": "x"}}, ["openai.enabled: needs plaintext"]),
        ({"controlPlane": {"args": ["max-num-seqs=3"]}}, ["args"]),
        ({"image": {"worker": {"digest": "latest"}}}, ["digest"]),
        (
            {"controlPlane": {"autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 1}}},
            ["controlPlane.autoscaling.maxReplicas=1: must be at least 2"],
        ),
    ],
)
@pytest.mark.parametrize("major", [3, 4])
def test_values_that_cannot_be_are_refused_by_name(given_values: dict[str, Any], words: list[str], major: int) -> None:
    with pytest.raises(Refused) as refusal:
        render(given_values, major=major)
    assert all(word in str(refusal.value) for word in words), refusal.value
