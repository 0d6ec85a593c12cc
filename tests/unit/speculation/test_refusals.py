"""What speaks against trying tokens ahead is said in a sentence, by flags and by workers."""

from __future__ import annotations

import pytest

from control_plane.config import load_config
from maniple.v1 import worker_pb2
from service_chassis.errors import ConfigurationError, InvalidParameter
from worker_service.runner import LoadOptions, ModelFacts
from worker_service.stages import _check_limits

ON = {"model": "scripted", "num_speculative_tokens": "4", "max_steps_in_flight": "1"}


def test_trying_ahead_is_off_unless_it_is_asked_for() -> None:
    assert load_config({"model": "scripted"}, {}).num_speculative_tokens == 0
    config = load_config(ON, {})
    assert (config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max) == (4, 3, 5)


@pytest.mark.parametrize(
    ("flags", "field", "value", "rule"),
    [
        ({"max_steps_in_flight": "2"}, "num_speculative_tokens", 4, "needs --max-steps-in-flight 1"),
        ({"num_speculative_tokens": "65"}, "num_speculative_tokens", 65, "must be"),
        ({"prompt_lookup_min": "6"}, "prompt_lookup_min", 6, "must be at most --prompt-lookup-max 5"),
        ({"prompt_lookup_min": "0"}, "prompt_lookup_min", 0, "must be"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: dict[str, str], field: str, value: int, rule: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_config({**ON, **flags}, {})
    ((found, given, said),) = refused.value.faults
    assert (found, given) == (field, value)
    assert said.startswith(rule)


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_steps_in_flight": 2}, "limits.max_steps_in_flight"),
        ({"prompt_lookup_min": 0}, "limits.prompt_lookup_min"),
        ({"prompt_lookup_max": 2}, "limits.prompt_lookup_min"),
    ],
)
def test_worker_refuses_limits_under_which_it_cannot_try_ahead(limits: dict[str, int], field: str) -> None:
    options = LoadOptions(model="scripted", max_num_seqs=4, max_num_batched_tokens=16, block_size=4)
    facts = ModelFacts(
        source="scripted",
        architecture="ScriptedModel",
        vocab_size=260,
        max_position=64,
        dtype="float32",
        weight_bytes=0,
        block_bytes=32,
        hidden_size=12,
        num_layers=1,
    )
    good = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "max_model_len": 64,
        "num_blocks": 20,
        "max_steps_in_flight": 1,
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 5,
    }
    _check_limits(worker_pb2.GroupLimits(**good), options, facts)
    with pytest.raises(InvalidParameter) as refused:
        _check_limits(worker_pb2.GroupLimits(**{**good, **limits}), options, facts)
    assert refused.value.field == field
