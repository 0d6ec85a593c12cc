"""What may not be imported: the control plane runs where there is no torch, and starts fast where there is."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_WALK = """
    import importlib, importlib.abc, pkgutil, sys

    forbidden = {forbidden!r}

    class Unimportable(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in forbidden:
                raise ModuleNotFoundError(f"{{name}} is made unimportable by this test", name=name)
            return None

    sys.meta_path.insert(0, Unimportable())
    seen = []
    for package in {packages!r}:
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, package + "."):
            # __main__ modules run; the command has a test of its own. What a Ray actor is made of is loaded by Ray,
            # and what checks tokens of an identity provider where there is one.
            if not module.name.endswith(("__main__", ".ray_actor", ".jwt_verifier")):
                importlib.import_module(module.name)
                seen.append(module.name)
    loaded = sorted(forbidden & {{name.partition(".")[0] for name in sys.modules}})
    assert not loaded, loaded
    print(len(seen))
"""


def _import_all(packages: list[str], forbidden: set[str]) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(_WALK).format(packages=packages, forbidden=forbidden)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("packages", "forbidden"),
    [
        (
            ["control_plane", "service_chassis", "maniple_client"],
            {
                *("torch", "transformers", "numba", "safetensors", "gguf", "worker_service", "maniple_kernels"),
                *("ray", "cloudpickle", "jwt", "cryptography", "prometheus_client", "opentelemetry"),
            },
        ),
        (["maniple_client"], {"control_plane", "service_chassis", "numpy", "rich", "structlog", "torch"}),
    ],
    ids=["control-plane-without-torch", "client-without-server"],
)
def test_every_module_imports_when_others_are_unimportable(packages: list[str], forbidden: set[str]) -> None:
    done = _import_all(packages, forbidden)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5, "the walk found too little to mean anything"


def test_import_guard_notices_a_forbidden_import() -> None:
    """The test above can fail: the same walk over a package that needs a forbidden one does."""
    done = _import_all(["maniple_client"], {"grpc"})
    assert done.returncode != 0
    assert "grpc is made unimportable" in done.stderr


def test_scheduling_imports_nothing_but_itself_and_pure_chassis_modules() -> None:
    program = textwrap.dedent("""
        import importlib, pkgutil, sys
        before = set(sys.modules)
        import control_plane.scheduling as root
        for module in pkgutil.walk_packages(root.__path__, "control_plane.scheduling."):
            importlib.import_module(module.name)
        new = set(sys.modules) - before
        for name in ("asyncio", "grpc", "google.protobuf", "structlog", "numpy", "maniple"):
            assert name not in new, name
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["no-such-command"]])
def test_command_imports_no_grpc_before_it_knows_what_to_do(argv: list[str]) -> None:
    program = textwrap.dedent(f"""
        import sys
        from control_plane.cli.main import main
        main({argv!r})
        heavy = {{"grpc", "rich", "structlog", "google", "numpy"}} & set(sys.modules)
        assert not heavy, heavy
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
