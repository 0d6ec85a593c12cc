"""Name the contents of a full KV block by a hash chain, the same in both services and in every language.

``root = BLAKE2b-128("maniple-kv-1" || namespace)``; ``hash = BLAKE2b-128(parent || token ids as little-endian u32)``.
The namespace is empty, or the hash of the adapter's name and the request's cache salt: only equal namespaces share.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def namespace_of(lora: str, cache_salt: str) -> bytes:
    """Return the namespace of an adapter and a salt: empty for neither, else 16 bytes."""
    if not lora and not cache_salt:
        return b""
    lora_bytes = lora.encode()
    return blake2b(
        len(lora_bytes).to_bytes(4, "little") + lora_bytes + cache_salt.encode(), digest_size=HASH_BYTES
    ).digest()


def root_hash(namespace: bytes) -> bytes:
    """Return the parent of a row's first block."""
    return blake2b(b"maniple-kv-1" + namespace, digest_size=HASH_BYTES).digest()


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Return ids as little-endian u32."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked_ids(packed: bytes) -> array[int]:
    """Return the ids that ``packed_ids`` packed."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the 16-byte name of a block that holds ``token_ids`` after the blocks that ``parent`` names."""
    return packed_block_hash(parent, packed_ids(token_ids))


def packed_block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """Return the same of ids that ``packed_ids`` packed."""
    return blake2b(parent + token_ids, digest_size=HASH_BYTES).digest()
