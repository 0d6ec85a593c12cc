"""What a user is told to type works where they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from control_plane.announcement import Ready
from control_plane.cli.announcements import ready_line
from control_plane.cli.command_name import command_name


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation in project/.venv that is not on PATH, called from project."""
    path = tmp_path / "project/.venv/bin/maniple"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(path), "serve"])
    return path


def test_command_on_the_path_is_called_by_its_name(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(installed.parent))
    assert command_name() == "maniple"


def test_command_below_the_working_directory_is_a_relative_path(installed: Path) -> None:
    assert command_name() == ".venv/bin/maniple"
    assert ready_line(Ready("127.0.0.1:50051", "demo", 8192, 100, 16)).endswith("Now type: .venv/bin/maniple chat")


def test_command_elsewhere_is_an_absolute_path(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "project/.venv/bin")
    assert command_name() == "./maniple"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert command_name() == str(installed)


def test_command_run_as_a_module_is_the_interpreters_neighbour(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/control_plane/cli/__main__.py", "serve"])
    monkeypatch.setattr(sys, "executable", str(installed.with_name("python")))
    assert command_name() == ".venv/bin/maniple"
    installed.unlink()
    assert command_name() == ".venv/bin/python -m control_plane.cli"
