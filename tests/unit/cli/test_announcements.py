"""How announcements appear: JSON lines that can be read back, few plain lines, one line that says what to type."""

from __future__ import annotations

import io

import pytest

from control_plane.announcement import Announcement, Ready, StageProgress, Stopping
from control_plane.cli.announcements import PlainLines, display, from_json, ready_line, to_json
from service_chassis.ids import Rank

READY = Ready("127.0.0.1:50051", "demo", 8192, 100, 16)


@pytest.mark.parametrize(
    "announcement", [StageProgress("load", Rank(0), 0.5, "layer 3"), READY, Stopping("SIGTERM", 2)]
)
def test_json_line_is_read_back(announcement: Announcement) -> None:
    line = to_json(announcement)
    assert "\n" not in line
    assert from_json(line + "\n") == announcement


@pytest.mark.parametrize("line", ["", "Traceback", "{}", "[1]", '{"event": "news"}', '{"event": "ready"}', "3"])
def test_lines_that_are_no_announcement_are_none(line: str) -> None:
    assert from_json(line) is None


def test_plain_lines_say_each_stage_twice_whatever_the_number_of_reports() -> None:
    out = io.StringIO()
    show = PlainLines(out)
    for percent in range(101):
        show(StageProgress("load", Rank(0), percent / 100))
        show(StageProgress("load", Rank(1), percent / 100))
    show(StageProgress("load", Rank(0), 1.0))
    assert out.getvalue().splitlines() == [
        "load, rank 0: begun",
        "load, rank 1: begun",
        "load, rank 0: done",
        "load, rank 1: done",
    ]


def test_ready_line_says_what_to_type_next() -> None:
    assert ready_line(READY).endswith("Now type: maniple chat")
    assert "1600 tokens" in ready_line(READY)
    elsewhere = Ready("unix:/tmp/s", "demo", 8192, 100, 16)
    assert ready_line(elsewhere).endswith("Now type: maniple chat --server unix:/tmp/s")


def test_display_without_a_terminal_is_plain() -> None:
    out = io.StringIO()
    with display("auto", out) as show:
        show(READY)
    assert out.getvalue() == ready_line(READY) + "\n"
