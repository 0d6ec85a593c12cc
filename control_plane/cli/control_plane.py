"""``maniple control-plane``: a control plane whose workers run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO, cast

from control_plane.cli.announcements import CurrentStderr
from control_plane.cli.config_flags import add_config_flags, flag_texts, print_faults
from control_plane.cli.serve import add_announce_flag, serve_in_foreground
from control_plane.config import load_config
from control_plane.doors import kserve_extra
from control_plane.exit_codes import USAGE
from service_chassis.command_parser import CommandParser
from service_chassis.errors import ConfigurationError
from service_chassis.telemetry import LogFormat, configure_logging

NAME = "maniple control-plane"
EPILOG = """\
Every flag has an environment variable, named in brackets; a flag wins over it.

Examples:
  maniple control-plane --worker-addresses gpu-0:50061,gpu-1:50061 --model /models/my-model \\
      --rank-tls-ca ca.crt --rank-tls-certificate plane.crt --rank-tls-key plane.key
  maniple control-plane --worker-addresses dns:///workers.default.svc:50061 --allow-plaintext-workers
  maniple control-plane --worker-addresses unix:/run/rank0.sock,unix:/run/rank1.sock --model scripted

It starts no worker and kills none: that is for whoever runs `maniple worker`.
"""


def run(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog=NAME,
        usage=f"{NAME} [FLAGS]",
        description="Serve with workers that run elsewhere.",
        epilog=f"{EPILOG}\n{kserve_extra.sentence()}\n",
    )
    add_config_flags(parser)
    add_announce_flag(parser)
    arguments = parser.parse_args(argv)
    try:
        config = load_config(flag_texts(arguments))
    except ConfigurationError as error:
        print_faults(error, NAME)
        return USAGE
    configure_logging(config.log_level, cast(LogFormat, config.log_format), stream=cast(TextIO, CurrentStderr()))
    return serve_in_foreground(config, arguments.announce, command=NAME, workers_elsewhere=True)
