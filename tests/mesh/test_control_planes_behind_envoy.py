"""Two control planes over the same workers behind one name: docs/proxies/envoy.yaml, and clients that know it alone."""

from __future__ import annotations

import asyncio
import itertools
import signal
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from control_plane.announcement import Ready
from maniple_client import AlreadyExists, AsyncClient, ManipleError, TransportLost, Unavailable
from support.envoy import Envoy, envoys, recommended
from support.takeover import Reading, all_free, prompt_of, site
from support.waiting import until

pytestmark = pytest.mark.usefixtures("page")
HEALTHY = "cluster.maniple.membership_healthy"


@dataclass
class Load:
    """Clients that ask again and again, and what became of it."""

    one: AsyncClient
    num_tokens: int = 60
    num_sent_again: int = 0
    num_begun_anew: int = 0
    readings: list[Reading] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _is_over: bool = False

    def start(self, num_clients: int) -> None:
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(num_clients)]

    async def _ask_on(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            request_id, was_sent = f"load-{number}", False
            while (error := await self._ask(request_id, prompt_of(number))) is not None:
                # Nothing of it was heard, so it is for us to send it again, with the same id. It is refused then if its
                # first try was admitted all the same, and under a new id nothing is lost: docs/clients.md.
                if isinstance(error, AlreadyExists):
                    assert was_sent, f"{request_id} was drawn once"
                    self.num_begun_anew += 1
                    request_id, was_sent = f"{request_id}-anew", False
                else:
                    self.num_sent_again += 1
                    was_sent = True
                await asyncio.sleep(0.05)

    async def _ask(self, request_id: str, prompt: list[int]) -> ManipleError | None:
        """Return how it ended before it was known to have begun; None: it was whole. Anything else is a failure."""
        reading = Reading(self.one, request_id, prompt, self.num_tokens)
        try:
            await reading.whole()
        except (TransportLost, Unavailable, AlreadyExists) as error:
            if reading.started is not None:
                raise
            return error
        self.readings.append(reading)
        return None

    async def reaches(self, count: int) -> None:
        """Wait until so many were answered; one that ended badly ends the wait."""
        await until(lambda: len(self.readings) >= count or self._failed, f"{count} answers", timeout_s=40)
        for task in self._tasks:
            if task.done():
                task.result()

    @property
    def _failed(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def stop(self) -> str:
        """Let what runs end; every request must be whole. Return the figures."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        gaps = [b - a for one in self.readings for a, b in itertools.pairwise(one.token_at)]
        again = f"{self.num_sent_again} sent again before they began, {self.num_begun_anew} then begun under a new id"
        return f"{len(self.readings)} requests, 0 lost, {again}, longest time without tokens {max(gaps):.2f} s"


def behind(directory: Path, names: str) -> AbstractAsyncContextManager[list[Envoy]]:
    """Run Envoy before control planes of these names, present or to come."""
    return envoys(directory, recommended(*(f"unix:{directory}/{name}.sock" for name in names)))


async def are_healthy(envoy: Envoy, count: int) -> None:
    await until(lambda: envoy.count(HEALTHY) == count, f"{count} are healthy", timeout_s=20)


async def test_two_control_planes_share_the_load_and_survive_one_being_killed(tmp_path: Path) -> None:
    """The owner computes and the spare relays to it: to clients they are alike."""
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare()
        async with (
            asyncio.timeout(100),
            behind(tmp_path, "ab") as [envoy],
            AsyncClient(envoy.address(), resume_for_s=20.0) as one,
        ):
            await are_healthy(envoy, 2)
            load = Load(one)
            load.start(6)
            await load.reaches(8)
            assert all(count >= 3 for count in envoy.requests_by_address("maniple").values()), "one got all"
            owner.signal(signal.SIGKILL)
            await spare.heard(Ready)
            await load.reaches(len(load.readings) + 8)
            print(f"owner killed: {await load.stop()}")
        await all_free(spare)


async def test_rolling_upgrade_under_load_loses_nothing(tmp_path: Path) -> None:
    """Each of two is replaced in turn, as a Deployment does it: a new one is ready, then an old one gets SIGTERM."""
    async with site(tmp_path) as here:
        old = await here.owner_and_spare("--handover")
        async with (
            asyncio.timeout(100),
            behind(tmp_path, "abcd") as [envoy],
            AsyncClient(envoy.address(), resume_for_s=20.0) as one,
        ):
            await are_healthy(envoy, 2)
            load = Load(one)
            load.start(6)
            await load.reaches(8)
            new = []
            for name, leaving in zip("cd", old, strict=True):
                new.append(here.control_plane(name, "--handover"))
                await are_healthy(envoy, 3)
                leaving.signal(signal.SIGTERM)
                assert await leaving.exit_code(within_s=30) == 0
                await are_healthy(envoy, 2)
                await load.reaches(len(load.readings) + 6)
            print(f"both replaced: {await load.stop()}")
            [owner] = [each for each in new if each.is_ready]
        await all_free(owner)
