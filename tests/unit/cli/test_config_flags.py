"""Flags are the configuration's fields, and their text travels unread."""

from __future__ import annotations

import argparse

import pytest

from control_plane.cli.config_flags import add_config_flags, flag_texts, print_faults
from control_plane.config import load_config
from service_chassis.errors import ConfigurationError


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(made)
    return made


def test_no_flag_gives_no_text(parser: argparse.ArgumentParser) -> None:
    assert flag_texts(parser.parse_args([])) == {}


def test_flags_of_the_issue_are_there_by_their_names(parser: argparse.ArgumentParser) -> None:
    words = (
        "--model scripted --served-model-name a b --listen 0.0.0.0:0 --tensor-parallel-size 1 --executor mp "
        "--device cpu --dtype float32 --max-model-len 100 --max-num-seqs 3 --max-num-batched-tokens 7 --block-size 4 "
        "--kv-cache-memory 2GiB --no-enable-prefix-caching --max-steps-in-flight 4 --seed 5"
    )
    config = load_config(flag_texts(parser.parse_args(words.split())), {})
    assert config.served_model_name == ("a", "b")
    assert config.kv_cache_memory_bytes == 2 * 1024**3
    assert config.enable_prefix_caching is False
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_steps_in_flight) == (3, 7, 4)
    assert (config.seed, config.dtype, config.block_size, config.max_model_len) == (5, "float32", 4, 100)
    assert load_config(flag_texts(parser.parse_args(["--num-kv-blocks", "9"])), {}).num_kv_blocks == 9


def test_unreadable_flags_reach_the_report_instead_of_ending_the_parse(parser: argparse.ArgumentParser) -> None:
    arguments = parser.parse_args(["--block-size", "x", "--seed", "y"])
    with pytest.raises(ConfigurationError) as caught:
        load_config(flag_texts(arguments), {})
    assert [fault[0] for fault in caught.value.faults] == ["seed", "block_size"]


def test_faults_are_printed_under_the_flags_name(capsys: pytest.CaptureFixture[str]) -> None:
    print_faults(ConfigurationError([("kv_cache_memory_bytes", "x", "must be a size")]), "maniple serve")
    assert "  --kv-cache-memory x: must be a size" in capsys.readouterr().err


def test_fault_inside_of_a_value_is_printed_under_the_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_faults(ConfigurationError([("model.speed", 'scripted:{"speed": 1}', "unknown")]), "maniple serve")
    assert '  --model.speed scripted:{"speed": 1}: unknown' in capsys.readouterr().err


def test_help_shows_defaults_as_they_are_typed(parser: argparse.ArgumentParser) -> None:
    assert "(default RS256,ES256,EdDSA)" in " ".join(parser.format_help().split())


def test_help_shows_no_empty_default(parser: argparse.ArgumentParser) -> None:
    shown = " ".join(parser.format_help().split())
    assert "(default )" not in shown
    assert "(default 127.0.0.1:50051) [MANIPLE_LISTEN]" in shown


def test_wrong_addresses_are_shown_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config({"model": "scripted", "worker_addresses": "a:1,b:1;c"}, {})
    print_faults(caught.value, "maniple control-plane")
    assert "  --worker-addresses a:1,b:1;c: must be" in capsys.readouterr().err
