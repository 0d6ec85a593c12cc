"""Render the chart with the real helm, and find things in what comes out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.platform_tools import helm

CHART = Path(__file__).resolve().parents[1] / "maniple"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
MAJORS = (3, 4)

Object = dict[str, Any]
# Each of these holds a pod template somewhere.
_POD_PATHS = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "LeaderWorkerSet": ("spec", "leaderWorkerTemplate", "workerTemplate"),
    "Pod": (),
}


class Refused(Exception):
    """Helm renders nothing; its words."""


@dataclass(frozen=True)
class Rendered:
    """The objects of a release."""

    objects: tuple[Object, ...]

    def of(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        [found] = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        return found

    def pods(self) -> Iterator[tuple[Object, Object]]:
        """Each object that makes pods, with the pod's metadata and spec."""
        for one in self.objects:
            if one["kind"] in _POD_PATHS:
                template = one
                for key in _POD_PATHS[one["kind"]]:
                    template = template[key]
                yield one, template

    def containers(self) -> Iterator[tuple[Object, Object, Object]]:
        """Each container, with its pod and what made that."""
        for owner, pod in self.pods():
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
                yield owner, pod, container


def render(values: Mapping[str, Any] | Path | None = None, *, major: int = 4, words: tuple[str, ...] = ()) -> Rendered:
    """Render the release ``r`` in the namespace ``llm``.

    Raises:
        Refused: with what helm says.
    """
    done = _template(values, major, words)
    if done.returncode != 0:
        raise Refused(done.stderr)
    # `yes` is a word here, not a truth: Kubernetes reads YAML 1.2.
    return Rendered(tuple(one for one in yaml.safe_load_all(done.stdout) if one))


def _template(
    values: Mapping[str, Any] | Path | None, major: int, words: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    command = ["template", "r", str(CHART), "--namespace", "llm", *words]
    if isinstance(values, Path):
        return helm(major).run(*command, "--values", str(values))
    return helm(major).run(*command, "--values", "-", stdin=json.dumps(dict(values or {})))


def env(container: Object) -> dict[str, str]:
    """The variables of a container that have a value of their own."""
    return {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
