"""``maniple serve``: a control plane and its workers on this machine, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from control_plane.cli.announcements import FORMATS, CurrentStderr, display
from control_plane.cli.config_flags import add_config_flags, flag_texts, print_faults
from control_plane.config import ControlPlaneConfig, count_gpus, gpu_is_present, load_config, resolve_auto
from control_plane.doors import kserve_extra
from control_plane.exit_codes import INTERRUPTED, USAGE
from service_chassis.command_parser import CommandParser
from service_chassis.errors import ConfigurationError
from service_chassis.telemetry import LogFormat, configure_logging

EPILOG = """\
Every flag has an environment variable, named in brackets; a flag wins over it.

Examples:
  maniple serve
  maniple serve --model ./my-model --listen 0.0.0.0:50051 --max-num-seqs 128
  maniple serve --model scripted --listen unix:/tmp/maniple.sock
  MANIPLE_KV_CACHE_MEMORY=2GiB maniple serve --model my-model.gguf

Ctrl-C or SIGTERM drains: no new requests, the running ones may finish within --drain-timeout-s.
"""


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="maniple serve",
        usage="maniple serve [FLAGS]",
        description="Serve a model: control plane and workers on this machine.",
        epilog=f"{EPILOG}\n{kserve_extra.sentence()}\n",
    )
    add_config_flags(made)
    add_announce_flag(made)
    return made


def add_announce_flag(parser: argparse.ArgumentParser) -> None:
    """Add the one flag that is not of the configuration."""
    parser.add_argument(
        "--announce",
        choices=FORMATS,
        default="auto",
        help="how progress and readiness appear on standard output: auto (bars on a terminal), plain lines, JSON lines",
    )


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        config = load_config(flag_texts(arguments))
    except ConfigurationError as error:
        print_faults(error, "maniple serve")
        return USAGE
    configure_logging(config.log_level, cast(LogFormat, config.log_format), stream=cast(TextIO, CurrentStderr()))
    return serve_in_foreground(config, arguments.announce, command="maniple serve")


def serve_in_foreground(
    config: ControlPlaneConfig, announce: str, *, command: str, workers_elsewhere: bool = False
) -> int:
    """Serve until told to stop; return the exit code. Faults are printed under the name of the command."""
    from control_plane.server import serve

    try:
        config = resolve_auto(
            config,
            has_gpu=gpu_is_present(),
            num_gpus=count_gpus(),
            on_terminal=sys.stderr.isatty(),
            workers_elsewhere=workers_elsewhere,
        )
        with display(announce) as show:
            return asyncio.run(serve(config, announce=show))
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigurationError as error:
        print_faults(error, command)
        return USAGE
