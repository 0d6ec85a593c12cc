"""Choose where workers live. Pure."""

from __future__ import annotations

from dataclasses import dataclass

UNI, MP, REMOTE, RAY, AUTO = "uni", "mp", "remote", "ray", "auto"
EXECUTORS = (AUTO, UNI, MP, REMOTE, RAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the choice depends on."""

    world_size: int
    num_local_devices: int  # on a CPU machine: ranks that its cores can carry
    has_worker_addresses: bool = False
    in_ray_placement_group: bool = False
    ray_is_installed: bool = False
    # `maniple control-plane`: it may end and be replaced at any time, so its workers must live somewhere else.
    workers_elsewhere: bool = False
    # `serve` with a real model: the device thread and the doors' event loop should not share an interpreter lock, and
    # a worker that crashes should not take the doors with it.
    wants_own_process: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """An executor with the reason, or, where ``executor`` is empty, the sentence that refuses."""

    executor: str
    reason: str


def choose_executor(wanted: str, surroundings: Surroundings) -> Choice:
    """Return the executor to use for ``wanted``, one of EXECUTORS."""
    choice = _automatic(surroundings) if wanted == AUTO else Choice(wanted, "asked for")
    if choice.executor == REMOTE and not surroundings.has_worker_addresses:
        return Choice("", f"{REMOTE} needs to know where the workers are: give --worker-addresses")
    if choice.executor != REMOTE and surroundings.has_worker_addresses:
        return Choice("", f"{choice.executor} has no use for --worker-addresses: use {REMOTE}")
    if choice.executor in (UNI, MP) and surroundings.workers_elsewhere:
        return Choice(
            "", f"{choice.executor} starts workers that end with it: use {REMOTE} with --worker-addresses, or {RAY}"
        )
    if choice.executor == RAY and not surroundings.ray_is_installed:
        return Choice("", f"{RAY} ({choice.reason}) needs Ray: pip install 'maniple[ray]'")
    if choice.executor == UNI and surroundings.world_size > 1:
        return Choice("", f"{UNI} has one rank, and {surroundings.world_size} are wanted: use {MP}")
    if choice.executor == MP and surroundings.world_size > surroundings.num_local_devices:
        have, want = surroundings.num_local_devices, surroundings.world_size
        return Choice("", f"{MP} has {have} devices on this machine, and {want} ranks are wanted")
    return choice


def _automatic(surroundings: Surroundings) -> Choice:
    if surroundings.has_worker_addresses:
        return Choice(REMOTE, "worker addresses are given")
    if surroundings.in_ray_placement_group:
        return Choice(RAY, "this process runs in a Ray placement group")
    if surroundings.workers_elsewhere:
        return Choice(REMOTE, "workers run elsewhere")
    if surroundings.world_size == 1 and not surroundings.wants_own_process:
        return Choice(UNI, "one rank")
    if surroundings.world_size <= surroundings.num_local_devices:
        return Choice(MP, "the ranks fit this machine")
    return Choice(RAY, f"{surroundings.world_size} ranks do not fit the {surroundings.num_local_devices} devices here")
