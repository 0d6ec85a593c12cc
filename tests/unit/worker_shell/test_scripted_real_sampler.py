"""Rows of the scripted model that go through the sampler of real models."""

from __future__ import annotations

import pytest

from service_chassis.scripted import ScriptedOptions
from support.scripted_driver import PROMPT, Driver, generate
from support.scripted_reference import greedy, logits, seeded
from worker_service.step_work import RowSampling

pytest.importorskip("torch")


def test_real_sampler_draws_what_the_plain_one_draws() -> None:
    through_torch = ScriptedOptions(sampler="torch")
    assert generate(Driver(through_torch), 0, PROMPT, 5) == greedy(PROMPT, 5)
    sampling = RowSampling(temperature=0.8, seed=12345)
    assert generate(Driver(through_torch), 0, PROMPT, 9, sampling=sampling) == seeded(PROMPT, 9, 12345, 0, 0.8)


def test_filters_penalties_and_bias_are_served_with_torch() -> None:
    best = sorted(range(260), key=lambda i: -logits(PROMPT)[i])
    few = RowSampling(temperature=1.5, top_k=3, seed=1)
    assert generate(Driver(), 0, PROMPT, 1, sampling=few)[0] in best[:3]
    one = RowSampling(allowed_token_ids=(best[100], best[50]))
    assert generate(Driver(), 0, PROMPT, 1, sampling=one) == [best[50]]
    biased = RowSampling(logit_bias=((best[200], 100.0),))
    assert generate(Driver(), 0, PROMPT, 1, sampling=biased) == [best[200]]
