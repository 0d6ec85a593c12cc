"""The flags of a control plane, and what is said of wrong ones."""

from __future__ import annotations

import argparse
import sys

from control_plane.config import ControlPlaneConfig
from service_chassis import flags
from service_chassis.errors import ConfigurationError


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of the configuration."""
    flags.add_flags(parser, ControlPlaneConfig)


def flag_texts(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the text of the configuration flags that were given, by field name."""
    return flags.flag_texts(arguments, ControlPlaneConfig)


def print_faults(error: ConfigurationError, command: str) -> None:
    """Say what is wrong with a configuration, one fault a line, under the name of the flag."""
    print(f"{command}: nothing was started, because of", file=sys.stderr)
    print("\n".join(flags.fault_lines(error.faults, ControlPlaneConfig)), file=sys.stderr)
