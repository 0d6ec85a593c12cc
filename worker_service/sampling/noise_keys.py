"""Derive the noise keys of many rows at once (service_chassis.protocol.noise, vectorised)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from service_chassis.protocol.arrays import UInt64Array, mix_array


def noise_keys(bases: UInt64Array, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """Return k0 and k1 of each sampled position.

    Args:
        bases: [num_rows] ``mix(mix(seed) ^ sample_index)``.
        positions: [num_rows] positions that the sampled tokens will have.
    Returns:
        [num_rows, 2] uint32.
    """
    keys = mix_array(bases ^ positions.astype(np.uint64))
    low = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.stack((low, (keys >> np.uint64(32)).astype(np.uint32)), axis=1)
