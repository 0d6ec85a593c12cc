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
    ("changes", "executor", "reason"),
    [
        ({"has_worker_addresses": True}, REMOTE, "worker addresses are given"),
        ({"has_worker_addresses": True, "in_ray_placement_group": True}, REMOTE, ""),  # the order of the rules
        ({"in_ray_placement_group": True}, RAY, "Ray placement group"),
        ({"world_size": 9, "num_local_devices": 8}, RAY, "9 ranks do not fit the 8 devices here"),
        ({"has_worker_addresses": True, "workers_elsewhere": True}, REMOTE, ""),
        ({"in_ray_placement_group": True, "workers_elsewhere": True}, RAY, ""),
    ],
)
def test_auto_goes_elsewhere_where_that_is_where_workers_are(
    changes: dict[str, object], executor: str, reason: str
) -> None:
    choice = choose_executor(AUTO, surroundings(ray_is_installed=True, **changes))
    assert choice.executor == executor
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("wanted", "changes", "sentence"),
    [
        (REMOTE, {}, "needs to know where the workers are"),
        (MP, {"has_worker_addresses": True}, "mp has no use for --worker-addresses: use remote"),
        (UNI, {"workers_elsewhere": True}, "uni starts workers that end with it"),
        (MP, {"workers_elsewhere": True}, "mp starts workers that end with it"),
        (AUTO, {"workers_elsewhere": True}, "needs to know where the workers are"),
        (RAY, {}, "ray (asked for) needs Ray: pip install"),
        (UNI, {"world_size": 2}, "has one rank, and 2 are wanted"),
        (MP, {"world_size": 2}, "1 devices on this machine, and 2 ranks"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(wanted: str, changes: dict[str, object], sentence: str) -> None:
    choice = choose_executor(wanted, surroundings(**changes))
    assert choice.executor == ""
    assert sentence in choice.reason


def test_what_was_asked_for_is_taken_where_it_works() -> None:
    assert choose_executor(UNI, surroundings(wants_own_process=True)).executor == UNI
    assert choose_executor(MP, surroundings()).executor == MP
    assert choose_executor(RAY, surroundings(ray_is_installed=True)).executor == RAY
    assert choose_executor(REMOTE, surroundings(has_worker_addresses=True)).executor == REMOTE
