"""Offer every field of a configuration as a flag, grouped by topic, helped by the field's own docstring."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

from service_chassis.settings import Fault, field_docstrings, settings_of


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add the flags. Their text is kept as it is for ``read_settings``, so that all faults are reported at once."""
    docs = field_docstrings(config_class)
    defaults = {one.name: one.default for one in dataclasses.fields(config_class)}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, made in settings_of(config_class).items():
        if made.is_internal:
            action = argparse.BooleanOptionalAction if made.is_switch else "store"
            parser.add_argument(made.flag, dest=name, action=action, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
            continue
        if made.topic not in groups:
            groups[made.topic] = parser.add_argument_group(made.topic)
        group = groups[made.topic]
        default = defaults[name]
        shown = "" if default in (None, (), "") else f" (default {_shown(default)})"
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
    return ("on" if default else "off") if isinstance(default, bool) else _typed(default)


def flag_texts(arguments: argparse.Namespace, config_class: type) -> dict[str, str]:
    """Return the text of the configuration flags that were given, by field name."""
    texts = {}
    for name in settings_of(config_class):
        if hasattr(arguments, name):
            value = getattr(arguments, name)
            texts[name] = ",".join(value) if isinstance(value, list) else str(value)
    return texts


def fault_lines(faults: Iterable[Fault], config_class: type) -> list[str]:
    """Say each fault in a line, under the name of its flag. A field may be one inside of a flag's value."""
    flags = {name: made.flag for name, made in settings_of(config_class).items()}
    lines = []
    for field, value, rule in faults:
        name, dot, inside = field.partition(".")
        named = f"{flags[name]}{dot}{inside}" if name in flags else field
        lines.append(f"  {named} {_typed(value)}".rstrip() + f": {rule}")
    return lines


def _typed(value: object) -> str:
    """Return a value as it is typed: words by commas, groups of them by semicolons."""
    if isinstance(value, tuple):
        return (";" if any(isinstance(one, tuple) for one in value) else ",").join(map(_typed, value))
    text = str(value)
    return text if text.isprintable() else repr(text)


def flag_words(flag: str, value: object) -> list[str]:
    """Return the words that give ``value`` to ``flag`` on a command line."""
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if isinstance(value, tuple):
        return [flag, ",".join(map(str, value))]
    return [flag, str(value)]
