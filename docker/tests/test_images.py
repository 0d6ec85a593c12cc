"""The images, as far as they can be tried without a container engine: linted, and their build stages done here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dockerfile import DOCKERFILES, ROOT, build, instructions

from support.platform_tools import hadolint

# DL3013, DL3042: versions are pinned by the package's own metadata, and the cache is off by a variable.
_LEFT_OUT = ("DL3013", "DL3042", "SC2086")
each_file = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


@each_file
def test_hadolint_finds_nothing(path: Path) -> None:
    ignored = [word for rule in _LEFT_OUT for word in ("--ignore", rule)]
    done = hadolint().run("--format", "json", *ignored, str(path))
    assert json.loads(done.stdout or "[]") == [], done.stderr


@each_file
def test_image_runs_as_a_number_that_is_not_root_and_its_process_gets_signals(path: Path) -> None:
    last = [one for one in instructions(path) if one.stage == 2]
    [user] = [one.rest for one in last if one.word == "USER"]
    assert user == "10001:10001"  # as in the chart's security context
    [entry] = [one.rest for one in last if one.word == "ENTRYPOINT"]
    assert len(json.loads(entry)) == 1  # a list: no shell stands between the signal and the process
    [base] = [one.rest for one in instructions(path) if one.word == "ARG" and one.stage == 0]
    assert base.startswith("PYTHON_IMAGE=")  # a digest can be given
    assert all(one.rest.startswith("${PYTHON_IMAGE}") for one in instructions(path) if one.word == "FROM")


@each_file
def test_context_has_what_is_copied_and_nothing_secret(path: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name
        for one in instructions(path)
        if one.word == "COPY" and "--from" not in one.rest
        for name in one.rest.split()[:-1]
    }
    assert copied <= allowed
    assert all((ROOT / name).exists() for name in copied)


def _build(stem: str, directory: Path) -> Path:
    return build(ROOT / f"docker/{stem}.Dockerfile", directory, {"DEVICE": "cpu"})


@pytest.mark.timeout(600)
def test_control_plane_image_holds_a_server_without_torch_that_obeys_sigterm(tmp_path: Path) -> None:
    opt = _build("control-plane", tmp_path)
    packages = (opt / "maniple/packages.txt").read_text().lower()
    assert "grpcio==" in packages
    assert not {"torch", "numba", "triton", "transformers"} & {line.split("==")[0] for line in packages.splitlines()}
    command = [str(opt / "maniple/bin/maniple"), "control-plane", "--model", "scripted", "--announce", "plain"]
    command += ["--worker-addresses", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--probe-listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        assert process.stdout is not None
        while "server.started" not in process.stdout.readline():
            assert time.monotonic() < deadline
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="the constraints are for Linux")
def test_worker_image_holds_a_worker_that_loads_models(tmp_path: Path) -> None:
    opt = _build("worker", tmp_path)
    python = str(opt / "maniple/bin/python")
    done = subprocess.run(
        [python, "-c", "import torch, numba, safetensors, worker_service.model_runner; print(torch.__version__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch==" in (opt / "maniple/packages.txt").read_text()


@pytest.mark.timeout(600)
def test_gateway_image_holds_the_stock_gateway(tmp_path: Path) -> None:
    opt = _build("openai-gateway", tmp_path)
    done = subprocess.run([str(opt / "gateway/bin/smg"), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout
