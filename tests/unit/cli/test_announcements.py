"""How announcements appear: JSON lines that can be read back, few plain lines, one line that says what to type."""

from __future__ import annotations

import dataclasses
import io

import pytest

from control_plane.announcement import Announcement, Lost, OpenAiReady, Ready, StageProgress, Stopping
from control_plane.cli.announcements import (
    PlainLines,
    display,
    from_json,
    lost_line,
    ready_line,
    stopping_line,
    to_json,
)
from control_plane.config import ControlPlaneConfig
from control_plane.security_rules import client_flags
from service_chassis.ids import Rank

READY = Ready("127.0.0.1:50051", "demo", 8192, 100, 16)


@pytest.mark.parametrize(
    "announcement",
    [
        StageProgress("load", Rank(0), 0.5, "layer 3"),
        StageProgress("load", Rank(0), 0.5, group="1"),
        READY,
        OpenAiReady("http://127.0.0.1:8000/v1", 4711),
        Lost("rank 1 exited: killed by SIGKILL", 0.5, "1"),
        Lost("rank 1 exited: killed by SIGKILL", None),
        Stopping("SIGTERM", 2),
        Stopping("Ctrl-C", 2, 30.0, "Ctrl-C"),
    ],
)
def test_json_line_is_read_back(announcement: Announcement) -> None:
    line = to_json(announcement)
    assert "\n" not in line
    assert from_json(line + "\n") == announcement


@pytest.mark.parametrize("line", ["", "Traceback", "{}", "[1]", '{"event": "news"}', '{"event": "ready"}', "3"])
def test_lines_that_are_no_announcement_are_none(line: str) -> None:
    assert from_json(line) is None


def test_plain_lines_say_each_stage_once_whatever_the_number_of_reports() -> None:
    out = io.StringIO()
    show = PlainLines(out)
    for percent in range(101):
        show(StageProgress("load", Rank(0), percent / 100, "layer 1"))
        show(StageProgress("load", Rank(1), percent / 100))
    show(StageProgress("warm up", Rank(0), 0.0))
    assert out.getvalue().splitlines() == ["load: layer 1", "load on rank 1", "warm up"]


def test_stages_of_several_groups_are_told_apart() -> None:
    out = io.StringIO()
    show = PlainLines(out)
    for _ in range(2):
        show(StageProgress("load", Rank(0), 0.5, group="0"))
        show(StageProgress("load", Rank(1), 0.5, group="1"))
    assert out.getvalue().splitlines() == ["load on group 0", "load on rank 1 of group 1"]


def test_loss_says_what_happens_now() -> None:
    assert lost_line(Lost("rank 0 exited", 0.5)) == "Lost the workers: rank 0 exited; starting them anew in 0.5 s"
    assert lost_line(Lost("rank 0 exited", None, "1")) == "Lost group 1: rank 0 exited; giving up"


def test_stopping_says_whom_it_waits_for_and_how_to_hurry() -> None:
    assert stopping_line(Stopping("SIGTERM", 0, 30.0, "SIGTERM")) == "Stopping: SIGTERM"
    one = "Stopping: Ctrl-C; 1 request may still finish within 30 s; Ctrl-C again ends it now"
    assert stopping_line(Stopping("Ctrl-C", 1, 30.0, "Ctrl-C")) == one


def test_bars_on_a_terminal_end_in_the_ready_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with display("auto", out) as show:
        show(StageProgress("load", Rank(0), 0.25, "layer 1"))
        show(StageProgress("warm up", Rank(0), 0.0))
        show(READY)
        show(Stopping("SIGTERM", 3))
    assert ready_line(READY) in out.getvalue()
    assert "Stopping: SIGTERM; 3 requests may still finish" in out.getvalue()


def test_ready_line_says_what_to_type_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert ready_line(READY).endswith("Now type: maniple chat")
    assert "1600 tokens" in ready_line(READY)
    elsewhere = Ready("unix:/tmp/s", "demo", 8192, 100, 16)
    assert ready_line(elsewhere).endswith("Now type: maniple chat --server unix:/tmp/s")


def test_ready_line_of_a_wildcard_says_where_to_connect_to() -> None:
    assert ready_line(Ready("0.0.0.0:50052", "demo", 8192, 100, 16)).endswith(" chat --server 127.0.0.1:50052")
    assert ready_line(Ready("[::]:50052", "demo", 8192, 100, 16)).endswith(" chat --server 127.0.0.1:50052")
    assert ready_line(Ready("0.0.0.0:50051", "demo", 8192, 100, 16)).endswith(" chat")


def test_display_without_a_terminal_is_plain() -> None:
    out = io.StringIO()
    with display("auto", out) as show:
        show(READY)
    assert out.getvalue() == ready_line(READY) + "\n"


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, ""),
        ({"tls_certificate": "c", "tls_key": "k"}, " --tls-ca FILE"),
        (
            {"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"},
            " --tls-ca FILE --tls-certificate FILE --tls-key FILE",
        ),
        ({"tls_certificate": "c", "tls_key": "k", "auth_callers": "t"}, " --tls-ca FILE --token-file FILE"),
    ],
)
def test_ready_line_names_the_files_that_a_client_needs(options: dict[str, str], flags: str) -> None:
    config = ControlPlaneConfig(model="scripted", **options)  # type: ignore[arg-type]
    ready = dataclasses.replace(READY, client_flags=client_flags(config))
    assert ready_line(ready).endswith(f"chat{flags}")
