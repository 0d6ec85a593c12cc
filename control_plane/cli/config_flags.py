"""Offer every field of the configuration as a flag, grouped by topic, helped by the field's own docstring."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from control_plane.config import ControlPlaneConfig
from service_chassis.errors import ConfigurationError
from service_chassis.settings import field_docstrings, settings_of


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Their text is kept as it is: ``load_config`` reads it, so that all faults are reported at once."""
    docs = field_docstrings(ControlPlaneConfig)
    defaults = {one.name: one.default for one in dataclasses.fields(ControlPlaneConfig)}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, made in settings_of(ControlPlaneConfig).items():
        if made.topic not in groups:
            groups[made.topic] = parser.add_argument_group(made.topic)
        group = groups[made.topic]
        default = defaults[name]
        shown = "" if default in (None, ()) else f" (default {_shown(default)})"
        text = f"{docs[name]}{shown} [{made.variable}]".replace("%", "%%")
        if made.is_switch:
            group.add_argument(
                made.flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        elif made.many:
            group.add_argument(
                made.flag, dest=name, nargs="+", default=argparse.SUPPRESS, metavar=made.metavar, help=text
            )
        else:
            metavar = made.metavar or name.rsplit("_", 1)[-1].upper()
            group.add_argument(made.flag, dest=name, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _shown(default: object) -> str:
    return ("on" if default else "off") if isinstance(default, bool) else str(default)


def flag_texts(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the text of the configuration flags that were given, by field name."""
    texts = {}
    for name in settings_of(ControlPlaneConfig):
        if hasattr(arguments, name):
            value = getattr(arguments, name)
            texts[name] = ",".join(value) if isinstance(value, list) else str(value)
    return texts


def print_faults(error: ConfigurationError, command: str) -> None:
    """Say what is wrong with a configuration, one fault a line, under the name of the flag."""
    flags = {name: made.flag for name, made in settings_of(ControlPlaneConfig).items()}
    print(f"{command}: nothing was started, because of", file=sys.stderr)
    for field, value, rule in error.faults:
        print(f"  {flags.get(field, field)} {value}: {rule}", file=sys.stderr)
