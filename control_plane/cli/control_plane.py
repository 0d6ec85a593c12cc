"""``maniple control-plane``: a control plane whose workers run elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from control_plane.cli.config_flags import add_config_flags, flag_texts, print_faults
from control_plane.config import load_config
from control_plane.exit_codes import USAGE
from service_chassis.errors import ConfigurationError


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="maniple control-plane",
        usage="maniple control-plane [FLAGS]",
        description="Serve with workers that run elsewhere. The remote executor is not built yet: this command checks "
        "its flags and says so.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workers", nargs="+", metavar="ADDRESS", help="HOST:PORT of every rank in order, or one headless DNS name"
    )
    add_config_flags(parser)
    arguments = parser.parse_args(argv)
    try:
        load_config(flag_texts(arguments))
    except ConfigurationError as error:
        print_faults(error, "maniple control-plane")
        return USAGE
    print(
        "maniple control-plane: the remote executor is not built yet; `maniple serve` runs the workers on this machine",
        file=sys.stderr,
    )
    return USAGE
