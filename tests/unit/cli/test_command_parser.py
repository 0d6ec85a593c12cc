"""What every command's parser says of flags that it does not know, and how its help looks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from control_plane.cli import admin, serve
from control_plane.config import ControlPlaneConfig
from service_chassis.command_parser import CommandParser
from service_chassis.errors import ConfigurationError
from service_chassis.settings import settings_of
from worker_service.config import WorkerConfig, read_config

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--modle scripted", "unrecognized arguments: --modle scripted; --modle is perhaps --model\n"),
        ("--max_num_seqs=4", "--max_num_seqs is perhaps --max-num-seqs\n"),
        ("--port 8000", "what others call --port is --listen HOST:PORT here\n"),
        ("--zzz", "unrecognized arguments: --zzz\n"),
        ("more", "unrecognized arguments: more\n"),
        ("--announce loud", "argument --announce: invalid choice: 'loud' (choose from "),
    ],
)
def test_unknown_flag_is_refused_with_the_one_it_resembles(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.parser().parse_args(words.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert ("perhaps" in error) == ("perhaps" in said)


def test_verb_is_refused_under_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        admin.parser().parse_args(["update-weights"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "maniple admin update-weights: error: the following arguments are required: PATH"
    with pytest.raises(SystemExit):
        admin.parser().parse_args(["pasue"])
    assert "maniple admin: error: argument VERB: invalid choice: 'pasue' (choose from " in capsys.readouterr().err


def test_flags_of_others_are_translated_only_where_there_is_such_a_flag() -> None:
    parser = CommandParser(prog="x")
    parser.add_argument("--server")
    assert parser.meant("--port") == ""
    assert parser.meant("--serve") == "; --serve is perhaps --server"


def test_worker_names_unknown_flags_and_not_their_values() -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(["--divice", "cpu"], {})
    assert caught.value.faults == [("--divice", "", "is not a known flag; --divice is perhaps --device")]


def test_help_wraps_a_description_and_keeps_the_lines_of_an_epilog() -> None:
    parser = CommandParser(prog="x", description="word " * 40, epilog="Examples:\n  x " + "a" * 100)
    lines = parser.format_help().splitlines()
    assert max(len(line) for line in lines if "word" in line) < 100
    assert "  x " + "a" * 100 in lines


@pytest.mark.parametrize("config_class", [ControlPlaneConfig, WorkerConfig])
def test_every_flag_of_a_server_is_in_the_documents(config_class: type) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    known = set(re.findall(r"--[a-z0-9-]+", " ".join(page.read_text() for page in pages)))
    flags = [made.flag for made in settings_of(config_class).values() if not made.is_internal]
    assert len(flags) > 20
    assert [flag for flag in flags if not {flag, "--no-" + flag.removeprefix("--")} & known] == []
