"""What an operator who drains a server is told."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from control_plane.doors import admin
from control_plane.fleet import Fleet
from maniple.v1 import admin_pb2
from support.waiting import until


async def test_drain_that_ends_while_a_report_is_sent_is_told_of_in_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "_DRAIN_REPORT_S", 0.0)
    num_aborted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def drain(timeout_s: float | None) -> int:
        return await num_aborted

    nobody = cast(Any, None)
    door = admin.AdminDoor(Fleet(), nobody, version="", drain=drain, uptime_s=lambda: 0.0)
    reports = cast(Any, door.Drain(admin_pb2.DrainRequest(deadline_s=1.0), nobody))
    assert (await anext(reports)).num_aborted == 0
    num_aborted.set_result(2)
    await until(lambda: not door._under_way, "its end")
    assert [report.num_aborted async for report in reports] == [2]
