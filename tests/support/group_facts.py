"""A group's facts, for tests that have no group."""

from __future__ import annotations

from control_plane.group.settings import GroupFacts, ModelOnRanks
from service_chassis.ids import Epoch, Step


def group_facts() -> GroupFacts:
    model = ModelOnRanks(
        source="scripted",
        architecture="ScriptedModel",
        vocab_size=260,
        max_position=4096,
        dtype="float32",
        weight_bytes=0,
        num_kv_groups=1,
        hidden_size=12,
    )
    return GroupFacts(
        epoch=Epoch(1),
        formation_id="f1",
        features=frozenset(),
        first_step=Step(1),
        device="cpu",
        backend="none",
        model=model,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=32,
        max_steps_in_flight=2,
        kv_bytes=0,
        step_us_per_token=0.0,
        formed_in_s=0.0,
    )
