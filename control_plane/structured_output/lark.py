"""Write pieces of Lark grammars, as llguidance reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable

import llguidance

# Any text at all; also what no other rule takes.
ANY_TEXT = r"/(.|\n)*/"


def literal(text: str) -> str:
    """Return a string that matches exactly ``text``; nothing for nothing."""
    # Its lexer takes JSON's strings, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def regex(pattern: str) -> str:
    """Return a terminal that matches ``pattern`` as a whole."""
    return f"/{llguidance.regex_to_lark(pattern, use_ascii='')}/"


def one_of(terms: Iterable[str]) -> str:
    """Return an alternative of terms."""
    return " | ".join(terms)
