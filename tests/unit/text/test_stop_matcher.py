"""The automaton behind stop strings."""

from __future__ import annotations

from control_plane.text.stop_matcher import Match, StopMatcher


def test_match_names_its_place_relative_to_the_new_text() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("say ST") is None
    assert matcher.num_held == 2
    assert matcher.push("OP!") == Match("STOP", begin=-2, end=2)


def test_longest_possible_beginning_is_held() -> None:
    matcher = StopMatcher(["abcab", "bx"])
    matcher.push("zabcab"[:-1])
    assert matcher.num_held == 4
    matcher.push("c")  # "abcac": nothing of it can go on
    assert matcher.num_held == 0
    matcher.push("b")
    assert matcher.num_held == 1


def test_passed_over_match_is_not_found_later() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", may_match=False) is None
    assert matcher.push("b") is None
    assert matcher.push("aa") == Match("aa", begin=0, end=2)


def test_match_may_begin_where_it_could_not_end() -> None:
    matcher = StopMatcher(["aa"])
    matcher.push("a", may_match=False)
    assert matcher.push("a") == Match("aa", begin=-1, end=1)
