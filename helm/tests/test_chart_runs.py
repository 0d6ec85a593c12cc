"""What the chart renders, run as processes here: variables, flags, ports, probes, certificates, but no cluster."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rendering import CI_FILES, Object, Rendered, env, render

from control_plane.config import ControlPlaneConfig
from service_chassis.settings import settings_of
from support.remote_ranks import free_ports
from worker_service.config import WorkerConfig

# Read by others than our two configurations.
_OTHERS = {"MANIPLE_SERVER", "MANIPLE_CACHE"}
_SCRIPTED = "scripted:" + json.dumps({"step_time_s": 0.01, "sampler": "numpy"})


@pytest.mark.parametrize("file", CI_FILES, ids=lambda file: file.stem)
def test_every_variable_and_flag_is_one_that_the_programs_know(file: Path) -> None:
    known = {one.variable for kind in (ControlPlaneConfig, WorkerConfig) for one in settings_of(kind).values()}
    for _, _, container in render(file).containers():
        named = {one["name"] for one in container.get("env", []) if one["name"].startswith("MANIPLE_")}
        assert named <= known | _OTHERS, container["name"]


class Processes:
    """The pods of a render as processes on the loopback, with ports and paths of this machine."""

    def __init__(self, rendered: Rendered, directory: Path) -> None:
        self._directory = directory
        self._ports: dict[tuple[str, str], str] = {}
        self._rendered = rendered
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for secret in rendered.of("Secret"):
            folder = directory / secret["metadata"]["name"]
            folder.mkdir()
            for key, value in secret["data"].items():
                (folder / key).write_bytes(base64.b64decode(value))

    def port(self, pod: str, port: str) -> str:
        """The port here for one of a pod's."""
        if (pod, port) not in self._ports:
            self._ports[pod, port] = str(free_ports(1)[0])
        return self._ports[pod, port]

    def start(self, pod: str, template: Object, container: Object) -> None:
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        secrets = {one["name"]: one["secret"]["secretName"] for one in template["spec"]["volumes"] if "secret" in one}
        variables = {**os.environ, **env(container)}
        for name, value in env(container).items():
            for path, volume in mounts.items():
                if volume in secrets:
                    value = value.replace(path, str(self._directory / secrets[volume]))
            value = value.replace("$(POD_IP)", "127.0.0.1")
            if name.endswith(("LISTEN", "_ADDRESS", "_SERVER")) and name != "MANIPLE_WORKER_ADDRESSES":
                port = value.rpartition(":")[2]
                value = f"127.0.0.1:{self.port(pod, port)}"
            if name == "MANIPLE_WORKER_ADDRESSES":
                value = f"127.0.0.1:{self.port('worker', '50061')}"
            variables[name] = value
        if "MANIPLE_MODEL" in variables:
            variables["MANIPLE_MODEL"] = _SCRIPTED
            variables["MANIPLE_NUM_KV_BLOCKS"] = "2000"
        self.running[pod] = subprocess.Popen(
            [sys.executable, "-m", "control_plane.cli", *container["args"]],
            env=variables,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def health(self, pod: str, probe: Object) -> int:
        """Do what the kubelet does."""
        where = f"127.0.0.1:{self.port(pod, str(probe['grpc']['port']))}"
        with grpc.insecure_channel(where) as channel:
            request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            try:
                return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe["timeoutSeconds"]).status)
            except grpc.RpcError:
                return 0

    def wait(self, pod: str, probe: Object, *, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while self.health(pod, probe) != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < deadline, f"{pod} is not ready"
            assert self.running[pod].poll() is None, f"{pod} ended with {self.running[pod].poll()}"
            time.sleep(0.05)

    def generate(self, pod: str, *words: str) -> subprocess.CompletedProcess[str]:
        where = f"127.0.0.1:{self.port(pod, '50051')}"
        command = [sys.executable, "-m", "control_plane.cli", "generate", "--server", where, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[tuple[Processes, Object, Object]]:
    """The CPU trial: one group, and two control planes over it, mutual TLS between them."""
    rendered = render()
    processes = Processes(rendered, tmp_path)
    try:
        found = {container["name"]: (pod, container) for _, pod, container in rendered.containers()}
        processes.start("worker", *found["worker"])
        for name in ("a", "b"):
            processes.start(name, *found["control-plane"])
        yield processes, found["control-plane"][1], found["worker"][1]
    finally:
        processes.close()


@pytest.mark.timeout(180)
def test_trial_serves_is_probed_and_survives_a_killed_control_plane(
    trial: tuple[Processes, Object, Object],
) -> None:
    processes, plane, worker = trial
    processes.wait("worker", worker["livenessProbe"])
    for name in ("a", "b"):
        processes.wait(name, plane["readinessProbe"])  # the one that owns nothing passes calls on
    processes.wait("worker", worker["readinessProbe"])
    rendered = render()
    [asks] = [container for _, _, container in rendered.containers() if container["name"] == "generate"]
    service = rendered.one("Service", "r-maniple")
    assert env(asks)["MANIPLE_SERVER"] == f"r-maniple.llm.svc:{service['spec']['ports'][0]['port']}"
    assert asks["args"][0] == "generate"
    for name in ("a", "b"):
        done = processes.generate(name, *asks["args"][1:])  # what `helm test` does
        assert done.returncode == 0, done.stderr
        assert done.stdout
    processes.running["a"].kill()
    deadline = time.monotonic() + 30
    while (done := processes.generate("b", "--max-tokens=4", "Once more")).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.2)
    assert processes.health("b", plane["readinessProbe"]) == health_pb2.HealthCheckResponse.SERVING
    assert processes.running["worker"].poll() is None
    processes.running["b"].send_signal(signal.SIGTERM)
    assert processes.running["b"].wait(30) == 0


@pytest.mark.timeout(120)
def test_killed_rank_ends_the_container_and_its_readiness(tmp_path: Path) -> None:
    """A rank that is killed must not leave a Service that says ready: the supervisor takes all with it."""
    rendered = render({"workers": {"tensorParallelSize": 2}})
    processes = Processes(rendered, tmp_path)
    try:
        found = {container["name"]: (pod, container) for _, pod, container in rendered.containers()}
        pod, container = found["worker"]
        first = free_ports(8, consecutive=True)
        for index, port in enumerate(("50061", "50161", "50261", "9100")):
            processes._ports["worker", port] = str(first[2 * index])
        processes.start("worker", pod, container)
        processes.wait("worker", container["livenessProbe"])
        supervisor = processes.running["worker"]
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert supervisor.wait(10) != 0
        assert processes.health("worker", container["readinessProbe"]) == 0
    finally:
        processes.close()
