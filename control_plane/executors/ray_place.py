"""Find or make the Ray actors that hold the ranks of a group. Everything here blocks: call it on a thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.executors.ray_surroundings import in_placement_group
from service_chassis.ids import Rank
from service_chassis.telemetry import get_logger

log = get_logger()

NAMESPACE = "maniple"
_RETRY_S = 0.2
# So long some actors of a group may be there and others not, before what is there counts as left over.
_SETTLING_S = 2.0


class NoPlace(Exception):
    """There is no room for the group, or no cluster."""


@dataclass(frozen=True, slots=True)
class Place:
    """The actors of a group, by rank, and the placement group that ends with them (None: it is somebody else's)."""

    actors: Mapping[Rank, Any]
    placement_group: Any
    is_new: bool


def connect(address: str) -> None:
    """Join the cluster, unless this process is in one already. Raises ``NoPlace``."""
    import ray

    if ray.is_initialized():
        return
    try:
        # Its log lines would come on standard output, which is for what the command answers.
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NoPlace(f"there is no Ray cluster at {address!r}: {first}") from error


def find_or_make(name: str, world_size: int, bundle: Mapping[str, float], *, timeout_s: float, **terms: float) -> Place:
    """Return the actors called ``name``: those of an earlier control plane, or new ones.

    They are detached: they live on when whoever made them ends, and the next finds them by name. What is left of a
    group that fell apart is ended first.

    Args:
        name: of the group.
        world_size: its ranks.
        bundle: what each needs, as Ray counts it.
        timeout_s: for all of it.
        terms: of new actors; see ``RankActor``.

    Raises:
        NoPlace: the cluster has no room for all of them within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    settled_at = time.monotonic() + _SETTLING_S
    ranks = [Rank(index) for index in range(world_size)]
    while True:
        found = {rank: actor for rank in ranks if (actor := _actor(name, rank)) is not None}
        places, all_live = _ask_places(found, max(deadline - time.monotonic(), 0.0))
        if all_live and len(found) == world_size:
            return Place(found, places[0], is_new=False)
        if found and all_live and time.monotonic() < settled_at:  # somebody may be making them at this moment
            time.sleep(_RETRY_S)
            continue
        give_back(found.values(), places)
        place = _make_placement_group(world_size, bundle, max(deadline - time.monotonic(), 0.0))
        try:
            return Place(_make_actors(name, ranks, bundle, place, terms), place, is_new=True)
        except ValueError:  # a name is taken: another control plane was faster, or one that was killed is not gone yet
            give_back((), [place])
            if time.monotonic() > deadline:
                raise NoPlace(f"actors called {name} come and go: is another control plane starting them?") from None
            time.sleep(_RETRY_S)


def _actor_name(name: str, rank: Rank) -> str:
    return f"{name}/rank{rank}"


def _actor(name: str, rank: Rank) -> Any:
    import ray

    try:
        return ray.get_actor(_actor_name(name, rank), namespace=NAMESPACE)
    except ValueError:
        return None


def _ask_places(actors: Mapping[Rank, Any], timeout_s: float) -> tuple[list[Any], bool]:
    """Return the placement groups of those that answer, and whether all do: a name outlives its actor by a moment.

    Raises:
        NoPlace: one is silent. It may be stuck, and it may be somebody's.
    """
    import ray

    places: list[Any] = []
    asked = [actor.own_place.remote() for actor in actors.values()]
    for ref in asked:
        try:
            places.append(ray.get(ref, timeout=timeout_s))
        except ray.exceptions.GetTimeoutError:
            raise NoPlace(f"Ray actors of this group are there, and did not answer within {timeout_s:.1f} s") from None
        except ray.exceptions.RayActorError:
            pass
    return places, len(places) == len(asked)


def give_back(actors: Iterable[Any], places: Iterable[Any]) -> None:
    """End actors and remove placement groups; what is gone already is fine."""
    import ray

    for actor in actors:
        ray.kill(actor)
    for place in places:
        if place is not None:
            ray.util.remove_placement_group(place)


def _make_placement_group(world_size: int, bundle: Mapping[str, float], timeout_s: float) -> Any:
    """Reserve a bundle for every rank, on one host where one is large enough; None inside somebody else's."""
    import ray

    if in_placement_group():
        return None
    kind = "GPU" if "GPU" in bundle else "CPU"
    fits_one_host = any(node["Alive"] and node["Resources"].get(kind, 0) >= world_size for node in ray.nodes())
    strategy = "STRICT_PACK" if fits_one_host else "PACK"
    place = ray.util.placement_group([dict(bundle)] * world_size, strategy=strategy, lifetime="detached")
    if not place.wait(timeout_s):
        give_back((), [place])
        have = ray.available_resources().get(kind, 0)
        raise NoPlace(f"the Ray cluster has {have:g} {kind}s free, and {world_size} ranks want one each")
    return place


def _make_actors(
    name: str, ranks: list[Rank], bundle: Mapping[str, float], place: Any, terms: Mapping[str, float]
) -> dict[Rank, Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from control_plane.executors.ray_actor import RankActor

    actors: dict[Rank, Any] = {}
    for rank in ranks:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=place if place is not None else ray.util.get_current_placement_group(),
            placement_group_bundle_index=rank if place is not None else -1,
        )
        made = ray.remote(RankActor).options(
            name=_actor_name(name, rank),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,  # a rank is never patched into a living group
            max_concurrency=100,
            scheduling_strategy=strategy,
        )
        actors[rank] = made.remote(rank, len(ranks), owns_place=place is not None, **terms)
        log.info("rank.placed", rank=rank, actor=_actor_name(name, rank))
    return actors
