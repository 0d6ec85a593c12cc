"""The distribution: what a wheel holds, and that generated code is what the protos give."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_ROOTS = {
    "control_plane": ROOT,
    "worker_service": ROOT,
    "service_chassis": ROOT,
    "maniple": ROOT / "gen",
    "maniple_kernels": ROOT / "kernels",
    "maniple_client": ROOT / "clients" / "python",
}


def test_wheel_would_hold_our_packages_and_no_name_of_others() -> None:
    from setuptools import find_packages

    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    found = {name for where in find["where"] for name in find_packages(str(ROOT / where), include=find["include"])}
    assert {name.partition(".")[0] for name in found} == set(SOURCE_ROOTS)
    # Both are distributions of others; a wheel that held them would overwrite theirs.
    assert not {"gen", "kernels", "tests", "clients"} & found


@pytest.mark.parametrize("package", SOURCE_ROOTS)
def test_every_folder_with_modules_is_a_package(package: str) -> None:
    folders = {path.parent for path in (SOURCE_ROOTS[package] / package).rglob("*.py")}
    assert folders
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_generated_code_is_what_the_protos_give() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_drift_check_names_stale_missing_and_left_over_files(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import generate
    finally:
        sys.path.pop(0)
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for folder, files in ((fresh, {"a_pb2.py": "1", "b_pb2.py": "1"}), (committed, {"a_pb2.py": "2", "c_pb2.py": "1"})):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    assert generate.differences(fresh, committed) == ["left over: c_pb2.py", "missing: b_pb2.py", "stale: a_pb2.py"]


def test_base_install_names_every_third_party_import_of_the_control_plane() -> None:
    """What control plane, chassis and client import at any level is a dependency, not something of an extra."""
    distributions = {
        "google": "googleapis-common-protos",
        "grpc": "grpcio",
        "grpc_channelz": "grpcio-channelz",
        "grpc_health": "grpcio-health-checking",
        "grpc_reflection": "grpcio-reflection",
        "grpc_status": "grpcio-status",
        "huggingface_hub": "huggingface-hub",
        "smg_grpc_proto": "smg-grpc-proto",
    }
    declared = {line.partition(">")[0].strip() for line in PROJECT["project"]["dependencies"]}
    ours = set(SOURCE_ROOTS)
    imported: dict[str, str] = {}
    for package in ("control_plane", "service_chassis", "maniple_client"):
        for path in (SOURCE_ROOTS[package] / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                for name in names:
                    imported.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    # Where an extra is asked for it is imported, inside functions; test_imports shows that nothing else needs it.
    of_extras = {"ray", "cloudpickle", "jwt", "tritonclient", "smg", "opentelemetry", "prometheus_client"}
    known = sys.stdlib_module_names | ours | of_extras
    third_party = {name: path for name, path in imported.items() if name not in known}
    undeclared = {name: path for name, path in third_party.items() if distributions.get(name, name) not in declared}
    assert undeclared == {}
