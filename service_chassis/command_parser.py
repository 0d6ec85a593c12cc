"""The parser of every command: wrapped help, and errors that name the flag that was meant."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

# What others call it. Not near enough to be found by its letters.
_ELSEWHERE = {"--host": "--listen HOST:PORT", "--port": "--listen HOST:PORT"}
_UNKNOWN = "unrecognized arguments: "
_ALIKE = 0.7  # of difflib: most letters in the same order


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that takes no abbreviations and keeps the lines of an epilog."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
        super().error(message + "".join(self.meant(word) for word in words))

    def meant(self, word: str) -> str:
        """Return what to say of a word that is no flag of ours: the flag that it resembles. Nothing of any other."""
        flag = word.partition("=")[0]
        ours = [one for one in self._option_string_actions if one.startswith("--")]
        if not flag.startswith("--") or flag in ours:
            return ""
        elsewhere = _ELSEWHERE.get(flag, "")
        if elsewhere.partition(" ")[0] in ours:
            return f"; what others call {flag} is {elsewhere} here"
        near = difflib.get_close_matches(flag, ours, n=1, cutoff=_ALIKE)
        return f"; {flag} is perhaps {near[0]}" if near else ""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps a text of one line, and leaves others as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
