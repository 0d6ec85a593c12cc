"""What proxies serve from files of ours is made once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.envoy import ROOT
from support.toolchains import cache_directory, locked, npm


@pytest.fixture(scope="session")
def described() -> None:
    """build/maniple.binpb, as ``make descriptors`` writes it."""
    with locked(cache_directory()):
        subprocess.run([sys.executable, str(ROOT / "scripts/descriptor_set.py")], check=True)


@pytest.fixture(scope="session")
def page(described: None) -> None:
    """The page, as ``make web`` builds it."""
    npm(ROOT / "clients/web")
    with locked(cache_directory()):
        subprocess.run(["npm", "run", "--silent", "build"], cwd=ROOT / "clients/web", check=True)
