"""Put all groups of a control plane to sleep, wake them by tags, give them other weights: what AdminService asks.

What sleeps is one set of tags for all groups, those to come too. Scheduling rests while any of it does; it goes on with
the last tag that wakes, unless it was paused for another reason before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from control_plane.dormancy import RankMemory
from control_plane.pause import PauseMode
from service_chassis.errors import InvalidParameter, ManipleError, NotReady, WrongState
from service_chassis.sleep_tags import DEEPEST_SLEEP, MEMORY_TAGS, SCHEDULING, SLEEP_TAGS
from service_chassis.telemetry import get_logger

if TYPE_CHECKING:
    from control_plane.engine import Engine
    from control_plane.fleet import Fleet

log = get_logger()

T = TypeVar("T")

_NOT_STARTED_FOR_IT = "levels 1 and 2 need workers that were started with --enable-sleep-mode"


class Rest:
    """The sleep of a fleet. Owns what sleeps, and the order of changes: one at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._asleep: frozenset[str] = frozenset()  # memory, of groups here and to come
        self._level = 0  # at which a group that comes meanwhile is put to sleep
        self._ends_pause = False  # with the last tag that wakes; else somebody else has to
        self._pause_of_update = 0  # which one of the fleet's an update made, for itself
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self.num_held_back = 0  # lost groups that wait for that
        self._changing = asyncio.Lock()
        self._late: set[asyncio.Task[None]] = set()  # groups that came while all others slept
        self.weights_path = ""  # of weights that replaced those of the model

    # What AdminService asks

    @property
    def tags(self) -> list[str]:
        """What sleeps."""
        rests = self._fleet.is_paused or self._asleep
        return [tag for tag in SLEEP_TAGS if tag in self._asleep or (tag == SCHEDULING and rests)]

    async def sleep(self, level: int, mode: PauseMode) -> dict[str, list[RankMemory]]:
        """Pause generation, and at a level above 0 give memory back; return what of, by groups.

        Raises:
            InvalidParameter: there is no such level.
            NotReady: there is no group, or one is being formed.
            WrongState: the workers were not started for it, one has no place for its weights, or generation was
                resumed meanwhile. Nothing sleeps then that did not before.
            GroupLost: a group was lost by it.
        """
        if level > DEEPEST_SLEEP:
            raise InvalidParameter("level", level, f"must be from 0 to {DEEPEST_SLEEP}")
        fleet = self._fleet
        if not level:
            await fleet.pause(mode)
            return {}
        if not self._asleep:  # else a group may be waiting for all to wake
            self._check_groups()
        if not all(engine.limits.sleep for engine in fleet.engines().values()):
            raise WrongState(_NOT_STARTED_FOR_IT)
        if fleet.pause_mode is None or fleet.num_pauses == self._pause_of_update:
            self._ends_pause = True  # it is ours alone, also that of another sleep that has only begun
        await fleet.pause(mode)
        async with self._changing:
            if fleet.pause_mode is None:
                raise WrongState("generation was resumed before the server slept")
            before, self._asleep = self._asleep, frozenset(MEMORY_TAGS)
            self._level = max(self._level, level)
            self._is_awake.clear()
            try:
                return await _on_each(fleet.engines(), lambda engine: self._let_sleep(engine, level))
            except ManipleError:
                self._asleep = before | _asleep_in(fleet.engines().values())
                self._note_wake()
                raise

    async def _let_sleep(self, engine: Engine, level: int) -> list[RankMemory]:
        with engine.without_steps():  # a pause that comes meanwhile would let some fill the cache that is dropped
            await engine.empty_cache()
            return await engine.dormancy.sleep(level)

    async def wake_up(self, tags: Collection[str]) -> dict[str, list[RankMemory]]:
        """Wake what is named, or all; return the memory of those ranks that took any, by groups.

        Raises:
            InvalidParameter: an unknown tag; nothing was done.
            WrongState: scheduling cannot wake while memory sleeps, or a rank cannot have its memory; it sleeps on.
            GroupLost: a group was lost by it.
        """
        for tag in tags:
            if tag not in SLEEP_TAGS:
                raise InvalidParameter("tags", tag, f"must be one of {', '.join(SLEEP_TAGS)}")
        wanted = set(tags or SLEEP_TAGS)
        async with self._changing:
            left = [tag for tag in MEMORY_TAGS if tag in self._asleep - wanted]
            if SCHEDULING in wanted and left:
                rule = f"scheduling cannot go on while {' and '.join(left)} sleep: wake all, or name them too"
                raise WrongState(rule)
            if SCHEDULING in wanted:
                self._ends_pause = True
            engines = {
                name: engine for name, engine in self._fleet.engines().items() if engine.dormancy.asleep & wanted
            }
            was_asleep = bool(self._asleep)
            try:
                return await _on_each(engines, lambda engine: engine.dormancy.wake_up(wanted))
            finally:
                self._asleep = (self._asleep - wanted) | _asleep_in(self._fleet.engines().values())
                if was_asleep or SCHEDULING in wanted:
                    self._note_wake()

    def _note_wake(self) -> None:
        """Go on where nothing sleeps any more."""
        if self._asleep:
            return
        self._level = 0
        self._is_awake.set()
        if self._ends_pause:
            self._ends_pause = False
            self._fleet.unpause()

    async def update_weights(self, path: str) -> int:
        """Give all groups the weights of a model directory, or none; return the number of tensors.

        Requests stand still meanwhile, and are computed anew with the new weights.

        Raises:
            InvalidParameter: it is no checkpoint of this model, in the words of the rank that found it.
            NotReady: there is no group, or one is being formed.
            WrongState: there is no memory to read it, or generation was paused and resumed meanwhile.
            GroupLost: a group was lost by it.
        """
        if not path:
            raise InvalidParameter("path", path, "must not be empty")
        fleet = self._fleet
        async with self._changing:
            self._check_groups()
            mode = fleet.pause_mode
            if mode is None:
                fleet.hold_still(PauseMode.KEEP)
                self._pause_of_update = fleet.num_pauses
            num_pauses, was_asleep = fleet.num_pauses, bool(self._asleep)
            try:
                await fleet.stand_still()
                engines = fleet.engines()
                with ExitStack() as held:
                    for engine in engines.values():
                        held.enter_context(engine.without_steps())  # also in a pause that comes meanwhile
                    return await self._replace_weights(engines, path)
            finally:
                self._asleep = _asleep_in(fleet.engines().values())
                if mode is not None:
                    if was_asleep:
                        self._note_wake()
                elif fleet.num_pauses == num_pauses:  # else somebody has paused it meanwhile
                    fleet.unpause()

    async def _replace_weights(self, engines: dict[str, Engine], path: str) -> int:
        try:
            nums = await _on_each(engines, lambda engine: engine.dormancy.stage_weights(path))
        except ManipleError:
            await _on_each(engines, lambda engine: engine.dormancy.abandon_weights())
            raise
        await _on_each(engines, lambda engine: engine.empty_cache())
        self.weights_path = path  # from here on: a group that is lost now comes back with them
        await _on_each(engines, lambda engine: engine.dormancy.commit_weights())
        return max(nums.values())

    def _check_groups(self) -> None:
        to_come = self._fleet.groups_to_come()
        if to_come or not self._fleet.engines():
            reasons = "; ".join(f"group {name}: {reason}" for name, reason in to_come.items())
            raise NotReady(f"not every group is there: {reasons}" if reasons else "there is no group")

    # What the keepers of groups ask

    async def until_awake(self) -> None:
        """Wait until nothing sleeps: the memory that a group needs was given away."""
        self.num_held_back += 1
        try:
            await self._is_awake.wait()
        finally:
            self.num_held_back -= 1

    def take(self, engine: Engine) -> None:
        """Bring the sleep of a group that comes, and that of the others, together."""
        asleep = engine.dormancy.asleep
        if asleep and not self._asleep:  # another owner let it sleep
            self._asleep, self._level = asleep, 1
            self._is_awake.clear()
            if self._fleet.pause_mode is None:
                self._ends_pause = True
                # What it kept it keeps; who comes anew is refused, whatever was in force there.
                self._fleet.hold_still(PauseMode.ABORT)
        elif self._asleep - asleep:
            task = asyncio.create_task(self._sleep_too(engine))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _sleep_too(self, engine: Engine) -> None:
        async with self._changing:
            try:
                if self._asleep:
                    await self._fleet.stand_still()
                    await self._let_sleep(engine, self._level)
                    if awake := set(MEMORY_TAGS) - self._asleep:
                        await engine.dormancy.wake_up(awake)
            except ManipleError as error:
                log.warning("group.not_asleep", reason=error.message)


def _asleep_in(engines: Iterable[Engine]) -> frozenset[str]:
    return frozenset(tag for engine in engines for tag in engine.dormancy.asleep)


async def _on_each(engines: dict[str, Engine], ask: Callable[[Engine], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Ask all engines at once; when all have answered, return the answers, or raise the first error."""
    answers = await asyncio.gather(*(ask(engine) for engine in engines.values()), return_exceptions=True)
    found: dict[str, T] = {}
    for name, answer in zip(engines, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        found[name] = answer
    return found
