"""Where the small files of a model are read: in its directory, or out of what the workers sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# All that the text side reads, and what clients need to build the same tokenizer: never weights, never code.
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class ModelFiles(Protocol):
    """The small files of one model."""

    @property
    def place(self) -> str:
        """Where they are, for people."""

    def path_of(self, name: str) -> str:
        """Return what to call a file, for people."""

    def read(self, name: str) -> bytes | None:
        """Return its content; None where there is no such file. Raises ``OSError``."""


@dataclass(frozen=True, slots=True)
class DirectoryFiles:
    """Files on this machine."""

    directory: Path

    @property
    def place(self) -> str:
        """See ``ModelFiles``."""
        return str(self.directory)

    def path_of(self, name: str) -> str:
        """See ``ModelFiles``."""
        return str(self.directory / name)

    def read(self, name: str) -> bytes | None:
        """See ``ModelFiles``."""
        path = self.directory / name
        return path.read_bytes() if path.is_file() else None


@dataclass(frozen=True, slots=True)
class SentFiles:
    """Files that a worker sent, kept in memory: nothing of them is on a disk here."""

    directory: str  # on the worker
    contents: Mapping[str, bytes]

    @property
    def place(self) -> str:
        """See ``ModelFiles``."""
        return f"{self.directory} on the workers"

    def path_of(self, name: str) -> str:
        """See ``ModelFiles``."""
        return f"{self.directory}/{name} on the workers"

    def read(self, name: str) -> bytes | None:
        """See ``ModelFiles``."""
        return self.contents.get(name)
