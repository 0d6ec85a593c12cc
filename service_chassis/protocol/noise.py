"""Draw the sampling noise (PROTOCOL B6): its bits are a pure function of (seed, sample index, position, token id).

Per sampled position, ``key = mix(mix(mix(seed) ^ sample_index) ^ position)``, ``k0 = key mod 2**32``,
``k1 = key >> 32``. Per token id, modulo 2**32: ``bits = fmix(fmix(id * 0x9E3779B1 + k0) ^ k1)`` with the murmur3
finaliser ``fmix``. The noise added to the score is ``-log(-log1p(-v))`` with ``v = min((bits + 0.5) / 2**32,
1 - 2**-24)`` in float32: a standard Gumbel value, so that the highest score is a draw from the softmax. ``position`` is
the position that the sampled token will have in its row. Bits are exact everywhere; the logarithms are not.
"""

from __future__ import annotations

from service_chassis.protocol.digest import mix

_M32 = 0xFFFFFFFF
GOLDEN32 = 0x9E3779B1
FMIX_A = 0x85EBCA6B
FMIX_B = 0xC2B2AE35


def noise_key(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    """Return (k0, k1), the two 32-bit keys of one sampled position."""
    key = mix(mix(mix(seed) ^ sample_index) ^ position)
    return key & _M32, key >> 32


def _fmix(x: int) -> int:
    x = ((x ^ x >> 16) * FMIX_A) & _M32
    x = ((x ^ x >> 13) * FMIX_B) & _M32
    return x ^ x >> 16


def noise_bits(k0: int, k1: int, token_id: int) -> int:
    """Return the 32 noise bits of one token id. The reference: vectorised forms are tested against it."""
    return _fmix(_fmix((token_id * GOLDEN32 + k0) & _M32) ^ k1)
