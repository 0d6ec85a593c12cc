"""The protocol's hashes and noise over numpy arrays: what ``digest`` and ``noise`` define one value at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from service_chassis.protocol.digest import MASK64, row_factor
from service_chassis.protocol.noise import FMIX_A, FMIX_B, GOLDEN32

UInt64Array = npt.NDArray[np.uint64]
UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]

_S27, _S30, _S31, _S32 = (np.uint64(n) for n in (27, 30, 31, 32))
_ADD = np.uint64(0x9E3779B97F4A7C15)
_MUL_A = np.uint64(0xBF58476D1CE4E5B9)
_MUL_B = np.uint64(0x94D049BB133111EB)
_S13, _S16 = np.uint32(13), np.uint32(16)


def mix_array(x: UInt64Array) -> UInt64Array:
    """Apply ``digest.mix`` to every element. Arithmetic on uint64 arrays wraps, as it must."""
    x = x + _ADD
    x = (x ^ x >> _S30) * _MUL_A
    x = (x ^ x >> _S27) * _MUL_B
    return x ^ x >> _S31


def token_terms_sum(row_key: int, first_position: int, token_ids: npt.ArrayLike) -> int:
    """Return the sum of ``digest.token_term`` over consecutive tokens of one row, modulo 2**64."""
    ids = np.asarray(token_ids).astype(np.uint64)
    positions = np.arange(first_position, first_position + len(ids), dtype=np.uint64)
    c = np.uint64(row_factor(row_key))
    return int(mix_array(c ^ mix_array(positions << _S32 | ids)).sum(dtype=np.uint64)) & MASK64


def block_terms(c: int, kv_group: int, first_index: int, block_ids: npt.ArrayLike) -> list[int]:
    """Return ``digest.block_term`` of blocks at consecutive places of one row's table."""
    ids = np.asarray(block_ids).astype(np.uint64)
    places = np.arange(first_index, first_index + len(ids), dtype=np.uint64) << _S32 | ids
    terms: list[int] = mix_array(np.uint64(c) ^ mix_array(places | np.uint64(kv_group << 58))).tolist()
    return terms


def noise_bits_array(k0: int, k1: int, token_ids: UInt32Array) -> UInt32Array:
    """Return ``noise.noise_bits`` of one sampled position for every id of ``token_ids``."""
    return _fmix(_fmix(token_ids * np.uint32(GOLDEN32) + np.uint32(k0)) ^ np.uint32(k1))


def gumbel_array(bits: UInt32Array) -> Float32Array:
    """Return the noise that the bits stand for, as ``noise`` writes it out."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    v = np.minimum(v, np.float32(1 - 2.0**-24))
    noise: Float32Array = -np.log(-np.log1p(-v))
    return noise


def _fmix(x: UInt32Array) -> UInt32Array:
    x = (x ^ x >> _S16) * np.uint32(FMIX_A)
    x = (x ^ x >> _S13) * np.uint32(FMIX_B)
    return x ^ x >> _S16
