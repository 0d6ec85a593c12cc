"""Numbers that no server takes are refused where they are typed."""

from __future__ import annotations

import pytest

from control_plane.cli import chat, generate, status
from control_plane.cli.main import main
from control_plane.exit_codes import USAGE


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("status --interval-s nan", "must be in [0.01, 86400]"),
        ("status --interval-s=-1", "must be in [0.01, 86400]"),
        ("status --interval-s 0", "must be in [0.01, 86400]"),
        ("generate x --max-tokens -1", "must be in [1, 4294967295]"),
        ("generate x --max-tokens 1.5", "must be a whole number"),
        ("generate x --min-tokens 4294967296", "must be in [0, 4294967295]"),
        ("generate x --seed -1", "must be in [0, 18446744073709551615]"),
        ("generate x --top-k 99999999999", "must be in [-1, 2147483647]"),
        ("generate x --temperature nan", "must be a finite number, at least 0"),
        ("generate x --temperature inf", "must be a finite number, at least 0"),
        ("generate x --top-p 0", "must be above 0 and at most 1"),
        ("generate x --min-p 2", "must be in [0, 1]"),
        ("generate x --timeout-s 1e10", "must be above 0 and at most 86400"),
        ("generate x --timeout-s nan", "must be above 0 and at most 86400"),
        ("generate x --n 0", "must be in [1, 4294967295]"),
        ("chat --max-tokens 0", "must be in [1, 4294967295]"),
    ],
)
def test_a_number_out_of_range_is_bad_usage_and_names_the_flag(
    words: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == USAGE
    said = capsys.readouterr().err
    flag = next(word for word in words.replace("=", " ").split() if word.startswith("--"))
    assert f"argument {flag}: " in said
    assert rule in said


def test_numbers_in_range_are_taken() -> None:
    words = "x --max-tokens 1 --top-k -1 --temperature 0 --seed 0 --timeout-s 0.5"
    given = generate.parser().parse_args(words.split())
    assert (given.max_tokens, given.top_k, given.temperature, given.seed, given.timeout_s) == (1, -1, 0.0, 0, 0.5)
    assert chat.parser().parse_args(["--top-p", "1"]).top_p == 1.0
    assert status.parser().parse_args([]).interval_s == 1.0
