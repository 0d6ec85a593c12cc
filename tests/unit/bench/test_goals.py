"""Medians of pairs, ratios, verdicts and lines of JSON, against values worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest


def _figure(**changed: Any) -> Any:
    from goals import Figure, at_least

    return Figure(**({"path": "x", "unit": "tokens/s", "goal": at_least(1.6)} | changed))


def test_ratio_is_the_median_of_the_pairs_ratios_and_not_the_ratio_of_medians() -> None:
    from goals import line_of

    # Ratios 1.5, 1.7 and 0.5; medians 120 and 100, whose ratio of 1.2 no pair had.
    line = line_of("row", _figure(), [(150.0, 100.0), (120.0, 70.588235), (100.0, 200.0)], {})
    assert (line["ours"], line["peer"], line["ratio"]) == (120.0, 100.0, 1.5)
    assert line["passed"] is False
    assert line["pairs"][1] == [120.0, 70.59]


def test_ratio_says_how_many_times_better_where_less_is_better() -> None:
    from goals import at_least, line_of

    line = line_of("row", _figure(better="less", unit="ms", goal=at_least(1.0)), [(20.0, 50.0)], {})
    assert (line["ratio"], line["passed"]) == (2.5, True)


@pytest.mark.parametrize("lost", [None, math.nan, 0.0], ids=str)
def test_a_pair_without_a_figure_of_the_peer_is_no_success(lost: float | None) -> None:
    from goals import line_of

    line = line_of("row", _figure(), [(200.0, 100.0), (200.0, lost), (200.0, 100.0)], {})
    assert (line["ratio"], line["passed"]) == (None, False)


@pytest.mark.parametrize(
    ("goal", "text", "ours", "met"),
    [
        ("ours_at_most", "ours <= 5 s", 5.0, True),
        ("ours_at_most", "ours <= 5 s", 5.01, False),
        ("ours_at_least", "ours >= 5 s", 5.0, True),
        ("ours_at_least", "ours >= 5 s", 4.99, False),
    ],
)
def test_our_own_figure_is_judged_without_a_peer(goal: str, text: str, ours: float, met: bool) -> None:
    import goals

    line = goals.line_of("row", _figure(unit="s", goal=getattr(goals, goal)(5.0)), [(ours, None)], {})
    assert (line["goal"], line["passed"], line["ratio"]) == (text, met, None)


def test_figures_are_found_by_keys() -> None:
    measured = {"itl_s": {"p50": 0.0025}, "ok": True, "text": "7"}
    assert _figure(path="itl_s/p50", scale=1000.0).of(measured) == 2.5
    for path in ("itl_s", "itl_s/p99", "ok", "text", "none/p50", "itl_s/p50/more"):
        assert _figure(path=path).of(measured) is None


@pytest.mark.parametrize(
    ("goal", "line", "passed"),
    [
        ("ratio >= 4", {"ours": 100, "ratio": 4.0}, True),
        ("ratio >= 4", {"ours": 100, "ratio": 3.9}, False),
        ("ratio >= 4", {"ours": 100}, False),
        ("ours <= 400", {"ours": 400}, True),
        ("ours <= 400 MB", {"ours": 401}, False),
        ("ours <= 400", {"ours": None}, False),
        (None, {"ours": 7}, None),
    ],
)
def test_lines_of_other_programs_are_judged_by_their_own_goal(
    goal: str | None, line: dict[str, Any], passed: bool | None
) -> None:
    from goals import judged

    assert judged({"bench": "one", "goal": goal, **line})["passed"] is passed


def test_goal_that_cannot_be_read_is_an_error() -> None:
    from goals import read_goal

    for text in ("faster", "ours < 5", "peer >= 1", "ours <= much"):
        with pytest.raises(ValueError, match=r"is no goal|could not convert"):
            read_goal(text)


def test_lines_for_programs_have_what_the_table_promises() -> None:
    from goals import at_least, failed_line, line_of, short

    good = json.loads(short(line_of("row", _figure(suffix="p50"), [(16.0, 10.0)], {"runs": [1, 2, 3]})))
    assert good == {
        "bench": "row p50",
        "ours": 16.0,
        "peer": 10.0,
        "ratio": 1.6,
        "goal": "ratio >= 1.6",
        "unit": "tokens/s",
        "passed": True,
    }
    bad = json.loads(short(failed_line("row", "tokens/s", at_least(1.6), "the server ended")))
    assert (bad["passed"], bad["ours"], bad["error"]) == (False, None, "the server ended")


def test_table_counts_goals_and_shows_errors() -> None:
    from goals import at_least, failed_line, line_of, table

    lines = [
        line_of("good", _figure(), [(16.0, 10.0)], {}),
        line_of("bad", _figure(), [(15.0, 10.0)], {}),
        failed_line("lost", "tokens/s", at_least(1.6), "the server ended"),
        line_of("free", _figure(goal=None), [(1.0, None)], {}),
    ]
    shown = table(lines).splitlines()
    assert [line.split()[-1] for line in shown[2:5]] == ["pass", "FAIL", "ERROR"]
    assert shown[5].strip() == "the server ended"
    assert shown[-1] == "1 of 3 goals reached, the rest not"


def test_document_has_every_line_and_says_what_was_not_reached() -> None:
    from goals import line_of, markdown, ours_at_most

    shown = markdown(
        [
            line_of("bad", _figure(), [(1500.0, 1000.0)], {}),
            line_of("good", _figure(unit="s", goal=ours_at_most(5.0)), [(4.2, None)], {}),
        ]
    ).splitlines()
    assert shown[2:] == [
        "| bad | 1,500 | 1,000 | tokens/s | 1.50 | ratio >= 1.6 | **no** |",
        "| good | 4.20 |  | s |  | ours <= 5 s | yes |",
    ]
