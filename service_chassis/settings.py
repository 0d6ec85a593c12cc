"""Read a process's configuration from flags and the environment into a frozen dataclass.

A field made by ``setting`` carries its topic, how its text is read and which rule its value keeps; the docstring under
the field is the help text of its flag. Flag > environment > default, for all fields in one function, ``read_settings``.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

T = TypeVar("T")

Fault = tuple[str, object, str]  # (field, value, rule), as ConfigurationError takes them
Rule = Callable[[Any], str]  # returns the broken rule as a phrase, or "" where the value is fine

ENVIRONMENT_PREFIX = "MANIPLE_"
_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field is named, read and checked."""

    topic: str
    read: Callable[[str], object]  # raises ValueError with the rule as a phrase
    rule: Rule
    flag: str  # "--max-num-seqs"
    metavar: str
    many: bool  # takes several words
    is_internal: bool  # for the program that starts this one: neither in the help nor in the environment
    prefix: str = ENVIRONMENT_PREFIX

    @property
    def variable(self) -> str:
        """The environment variable, MANIPLE_MAX_NUM_SEQS for --max-num-seqs."""
        return self.prefix + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def is_switch(self) -> bool:
        return self.read is read_switch


def setting(
    default: T,
    *,
    topic: str,
    read: Callable[[str], T],
    rule: Rule = lambda _: "",
    flag: str = "",
    metavar: str = "",
    many: bool = False,
    is_internal: bool = False,
) -> T:
    """Declare a configuration field. ``flag`` defaults to the field's name with dashes."""
    made = Setting(topic=topic, read=read, rule=rule, flag=flag, metavar=metavar, many=many, is_internal=is_internal)
    return field(default=default, metadata={_KEY: made})


def settings_of(config_class: type) -> dict[str, Setting]:
    """Return the settings by field name, in the order of their declaration.

    A class whose variables begin otherwise than ``ENVIRONMENT_PREFIX`` says so in ``environment_prefix``.
    """
    prefix = getattr(config_class, "environment_prefix", ENVIRONMENT_PREFIX)
    found = {}
    for one in fields(config_class):
        made: Setting = one.metadata[_KEY]
        flag = made.flag or "--" + one.name.replace("_", "-")
        found[one.name] = replace(made, flag=flag, prefix=prefix)
    return found


def field_docstrings(config_class: type) -> dict[str, str]:
    """Return the docstring under each field, on one line each. Python keeps none of them, so the source is read."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    body = cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, follower in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(follower, ast.Expr)
            and isinstance(follower.value, ast.Constant)
            and isinstance(follower.value.value, str)
        ):
            docs[statement.target.id] = " ".join(follower.value.value.split())
    return docs


def read_settings(
    config_class: type, flags: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[Fault]]:
    """Resolve flag > environment > default.

    Args:
        config_class: a dataclass whose fields are made by ``setting``.
        flags: the text of the flags that were given, by field name.
        environ: the process's environment. Unknown MANIPLE_* names are left alone: Kubernetes itself injects such
            names (MANIPLE_PORT, MANIPLE_SERVICE_HOST) for a Service called maniple.
    Returns:
        The values that were given and could be read, by field name, and a fault for each that could not.
    """
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, made in settings_of(config_class).items():
        text, source = flags.get(name), ""
        if text is None and not made.is_internal:
            text, source = environ.get(made.variable), f" (from {made.variable})"
        if text is None:
            continue
        try:
            values[name] = made.read(text)
        except ValueError as error:
            faults.append((name, text, f"{error}{source}"))
    return values, faults


def broken_rules(config: object) -> list[Fault]:
    """Check every field of ``config`` by its own rule."""
    faults: list[Fault] = []
    for name, made in settings_of(type(config)).items():
        value = getattr(config, name)
        broken = made.rule(value)
        if broken:
            faults.append((name, value, broken))
    return faults


# How text is read. Each raises ValueError with a phrase that completes "field=value: ...".


def read_text(text: str) -> str:
    return text


def read_words(text: str, separator: str = ",") -> tuple[str, ...]:
    """Read words separated by commas. An empty text has none; an empty word is a slip, and not to be guessed at."""
    words = tuple(part.strip() for part in text.split(separator))
    if words == ("",):
        return ()
    if not all(words):
        raise ValueError(f"must not have an empty item: two of {separator!r} in a row, or one at an end")
    return words


def read_wholes(text: str) -> tuple[int, ...]:
    """Read whole numbers separated by commas."""
    words = read_words(text)
    try:
        return tuple(map(int, words))
    except ValueError:
        raise ValueError("must be whole numbers, by commas, such as 1,2,4") from None


def read_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def read_optional_whole(text: str) -> int | None:
    return None if text.lower() in ("", "none") else read_whole(text)


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def read_switch(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def read_size(text: str) -> int:
    """Read a number of bytes: "2GiB", "512 MiB", "1.5G", "4096"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise ValueError('must be a size such as "2GiB", "512MiB" or a number of bytes')
    unit = _UNITS[match[2] or ""]
    # Whole numbers are kept as they are: a float would round a large one, and overflow at a very large one.
    try:
        return int(match[1]) * unit if match[1].isdecimal() else int(float(match[1]) * unit)
    except (ValueError, OverflowError):
        raise ValueError("must be a size that a machine can have") from None


# Rules.


def said(number: float) -> str:
    """Return a bound as people write it: whole numbers with all their digits."""
    return str(number) if isinstance(number, int) else f"{number:g}"


def at_least(minimum: float, *, at_most: float | None = None) -> Rule:
    """Demand ``minimum <= value``, and ``value <= at_most`` where given. None passes: the field is not set."""

    def rule(value: float | None) -> str:
        # `not (a <= b)` so that NaN breaks the rule.
        if value is None or (minimum <= value and (at_most is None or value <= at_most)):
            return ""
        if at_most is None:
            return f"must be at least {said(minimum)}"
        return f"must be in [{said(minimum)}, {said(at_most)}]"

    return rule


def zero_or_at_least(minimum: int, *, at_most: int) -> Rule:
    """Demand zero, which leaves the choice to the program, or ``minimum <= value <= at_most``."""

    def rule(value: float) -> str:
        fine = value == 0 or minimum <= value <= at_most
        return "" if fine else f"must be 0 or in [{said(minimum)}, {said(at_most)}]"

    return rule


def above(minimum: float, *, at_most: float | None = None) -> Rule:
    """Demand ``minimum < value``, finite, and ``value <= at_most`` where given."""

    def rule(value: float) -> str:
        limit = float("inf") if at_most is None else at_most
        if minimum < value <= limit and value != float("inf"):
            return ""
        if at_most is None:
            return f"must be a finite number above {said(minimum)}"
        return f"must be above {said(minimum)} and at most {said(at_most)}"

    return rule


def one_of(*choices: str) -> Rule:
    def rule(value: str) -> str:
        return "" if value in choices else f"must be one of {', '.join(choices)}"

    return rule
