"""The sampling noise over whole vocabularies: bits from the protocol, draws as the reference makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maniple_kernels import gumbel
from service_chassis.protocol.noise import noise_bits, noise_key
from worker_service.sampling.noise_keys import noise_keys
from worker_service.step_work import RowSampling


def test_noise_bits_are_the_protocols() -> None:
    ids = np.array([0, 1, 2, 255, 49151, 2**31 - 1, 2**32 - 1])
    for seed, sample_index, position in ((0, 0, 0), (1, 0, 5), (2**64 - 1, 63, 131071)):
        k0, k1 = noise_key(seed, sample_index, position)
        assert gumbel.noise_bits(k0, k1, ids).tolist() == [noise_bits(k0, k1, int(one)) for one in ids]


def test_noise_keys_are_the_protocols() -> None:
    from worker_service.sampling.columns import SamplingColumns

    columns = SamplingColumns(3, 10)
    cases = [(0, 0, 0), (7, 3, 123), (2**64 - 1, 63, 131071)]
    for row, (seed, sample_index, _) in enumerate(cases):
        columns.add(row, RowSampling(seed=seed), sample_index)
    keys = noise_keys(columns.noise_base, np.array([position for _, _, position in cases]))
    assert [tuple(pair) for pair in keys.tolist()] == [noise_key(*case) for case in cases]


def test_noise_lies_within_the_bounds_that_the_docstring_names() -> None:
    noise = gumbel.gumbel_noise(1, 2, np.arange(200_000))
    assert -2.82 < noise.min() < noise.max() < 22.88
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("vocab_size", [1, 63, 257, 5000])
def test_draws_are_those_of_the_reference_that_computes_all_noise(spread: float, vocab_size: int) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(vocab_size)
    scores = torch.from_numpy((rng.normal(size=(40, vocab_size)) * spread).astype(np.float32))
    scores[:, vocab_size // 2 + 1 :: 7] = -torch.inf
    keys = rng.integers(0, 2**32, (40, 2), dtype=np.uint32)
    drawn = gumbel.gumbel_argmax(scores, keys)
    reference = gumbel.gumbel_argmax_reference(scores.numpy(), keys)
    with_noise = scores.numpy() + np.stack([gumbel.gumbel_noise(*key, np.arange(vocab_size)) for key in keys.tolist()])
    rows = np.arange(40)
    # The logarithms of two libraries differ in the last bit: another id may win only where scores are that close.
    np.testing.assert_allclose(with_noise[rows, drawn], with_noise[rows, reference], rtol=1e-6, atol=1e-6)
    assert (drawn == reference).mean() > 0.95


def test_rows_without_any_allowed_id_take_the_lowest() -> None:
    assert gumbel.gumbel_argmax(torch.full((1, 100), -torch.inf), np.zeros((1, 2), np.uint32)).tolist() == [0]
