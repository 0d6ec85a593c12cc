"""Run somebody else's Jinja2 template: no access to Python's insides, bounded in time and size.

Jinja2's own sandbox guards attributes. What it leaves open is work: ``'a' * 10**9``, ``x ~ x`` in a loop,
``'%999999999d'``. So every call, filter, attribute and growing operator of a template checks the clock and the sizes of
its operands. One step may still take gigabytes: that is why clients' templates run elsewhere (client_templates.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_RENDER_S = 1.0
MAX_VALUE = 8 * 1024 * 1024  # characters of a string, items of a list, or a number given to a function
_MAX_POWER = 64
_WIDTH_IN_PERCENT = re.compile(r"%[^a-zA-Z%]*[\d*]")
_SPEC_IN_BRACES = re.compile(r"\{[^{}]*:[^{}]*[\d{]")

# Of the rendering that runs in this thread or task.
_ends_at: ContextVar[float] = ContextVar("template_ends_at", default=float("inf"))


class TemplateRefused(Exception):
    """The template said no, or ran into a bound. The text is for the client."""


def said(error: BaseException) -> str:
    """Return what a failed template has to say, on one line."""
    if isinstance(error, MemoryError):
        return "takes too much memory"
    text = " ".join(str(error).split())
    return text if isinstance(error, TemplateRefused) and text else f"{type(error).__name__}: {text}"


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.join((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the budget, and with the functions that chat templates expect."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], cache_size=0
        )
        for name, function in list(self.filters.items()):
            self.filters[name] = _checked(name, function)
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def begin(self) -> None:
        """Start the clock of a rendering in this thread or task."""
        _ends_at.set(time.monotonic() + MAX_RENDER_S)

    def join(self, values: Iterable[Any]) -> str:
        """Evaluate ``a ~ b ~ c``."""
        _tick()
        text = "".join(map(str, values))
        _check_size(text)
        return text

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _tick()
        for value in (*args, *kwargs.values()):
            _check_size(value)
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _tick()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and _SPEC_IN_BRACES.search(text):
            # A width inside the string, which no check of arguments sees.
            raise TemplateRefused("formats with a width, which is not allowed here")
        return super().wrap_str_format(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _tick()
        _check_size(left)
        _check_size(right)
        if operator == "%":
            _check_percent(left)
        elif operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        elif operator == "**" and isinstance(right, (int, float)) and right > _MAX_POWER:
            raise TemplateRefused(f"raises to a power above {_MAX_POWER}")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tick() -> None:
    if time.monotonic() > _ends_at.get():
        raise TemplateRefused(f"took longer than {MAX_RENDER_S} s")


def _check_size(value: object) -> None:
    size = len(value) if isinstance(value, (str, list, tuple, dict)) else value
    if isinstance(size, int) and abs(size) > MAX_VALUE:
        raise TemplateRefused(f"grew a value beyond {MAX_VALUE}")


def _check_repetition(value: object, times: object) -> None:
    if isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_VALUE:
        raise TemplateRefused(f"grew a value beyond {MAX_VALUE}")


def _check_percent(text: object) -> None:
    if isinstance(text, str) and _WIDTH_IN_PERCENT.search(text):
        raise TemplateRefused("formats with a width, which is not allowed here")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        _tick()
        for value in (*args, *kwargs.values()):
            _check_size(value)
        if name == "format":
            _check_percent(args[0] if args else None)
        return function(*args, **kwargs)

    # Jinja2 marks filters that take the context or environment by attributes of the function.
    checked.__dict__.update(getattr(function, "__dict__", {}))
    return checked


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja2's own: no HTML escapes, non-ASCII as it is. Prompts of models were trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
