from __future__ import annotations

import pytest

from control_plane.executors.selection import AUTO, MP, RAY, REMOTE, UNI, Surroundings, choose_executor


def surroundings(**changes: object) -> Surroundings:
    return Surroundings(**({"world_size": 1, "num_local_devices": 1} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "executor"),
    [
        ({}, UNI),
        ({"wants_own_process": True}, MP),
        ({"world_size": 4, "num_local_devices": 8}, MP),
        ({"world_size": 8, "num_local_devices": 8}, MP),
    ],
)
def test_auto_chooses_by_what_is_there(changes: dict[str, object], executor: str) -> None:
    assert choose_executor(AUTO, surroundings(**changes)).executor == executor


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"has_worker_addresses": True}, "remote (worker addresses are given)"),
        ({"has_worker_addresses": True, "in_ray_placement_group": True}, "remote"),  # the order of the rules
        ({"in_ray_placement_group": True}, "ray"),
        ({"world_size": 9, "num_local_devices": 8}, "ray (9 ranks do not fit the 8 devices here)"),
    ],
)
def test_auto_refuses_with_a_sentence_what_is_not_built(changes: dict[str, object], named: str) -> None:
    choice = choose_executor(AUTO, surroundings(**changes))
    assert choice.executor == ""
    assert f"executor {named}" in choice.reason
    assert "not built yet: use uni or mp" in choice.reason


def test_what_was_asked_for_is_taken_where_it_works() -> None:
    assert choose_executor(UNI, surroundings(wants_own_process=True)).executor == UNI
    assert choose_executor(MP, surroundings()).executor == MP
    for wanted in (REMOTE, RAY):
        assert choose_executor(wanted, surroundings()).executor == ""
    assert "has one rank, and 2 are wanted" in choose_executor(UNI, surroundings(world_size=2)).reason
    assert "1 devices on this machine, and 2 ranks" in choose_executor(MP, surroundings(world_size=2)).reason
