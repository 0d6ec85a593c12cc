"""Say what happens to named blocks, as plain values, for whoever keeps an index of prefix caches.

A block has a name, the chain hash of its contents, from when it is full until it is handed out again. A name is known
once: two rows that computed the same tokens at once leave one named block.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockContents(NamedTuple):
    """What a block holds."""

    parent: bytes | None  # name of the block before it; None at the head of a chain
    token_ids: bytes  # little-endian u32
    cache_namespace: bytes


class BlockStored(NamedTuple):
    """A block has got its name, and is or will be computed by a step that is planned."""

    name: bytes
    contents: BlockContents


class BlockRemoved(NamedTuple):
    """The contents of a block are gone."""

    name: bytes


class CacheCleared(NamedTuple):
    """All contents are gone."""


BlockEvent = BlockStored | BlockRemoved | CacheCleared
