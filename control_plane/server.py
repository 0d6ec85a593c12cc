"""Put one control plane together: model, group, engine, doors; serve until told to stop or the group is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from control_plane import exit_codes
from control_plane.announcement import Announcement, Ready, StageProgress, Stopping
from control_plane.assembly import build_engine, build_group
from control_plane.config import ControlPlaneConfig
from control_plane.doors import admin, health, inference, vllm_engine
from control_plane.doors.converters import draw_seed
from control_plane.doors.engine_seat import EngineSeat
from control_plane.doors.served_model import ServedModel
from control_plane.engine import Engine
from control_plane.group.loss import GroupNotFormed, LossReason
from control_plane.group.settings import GroupFacts
from control_plane.group.worker_group import WorkerGroup
from control_plane.model_store import ModelPlace, resolve_model
from control_plane.stop_signals import StopSignals
from control_plane.text.model_text import ModelText, load_model_text
from maniple.v1 import admin_pb2_grpc, inference_pb2_grpc
from service_chassis.errors import ConfigurationError, InvalidParameter
from service_chassis.ids import Rank
from service_chassis.reflection import add_reflection
from service_chassis.server import bind, make_server
from service_chassis.telemetry import get_logger

log = get_logger()

T = TypeVar("T")
Announce = Callable[[Announcement], None]

SERVICES = (inference.SERVICE, vllm_engine.SERVICE, admin.SERVICE, health.SERVICE)
# How long calls may take to end by themselves once nothing can come any more.
_FAREWELL_S = 1.0


async def serve(config: ControlPlaneConfig, *, announce: Announce) -> int:
    """Serve until SIGTERM, SIGINT or the loss of the group, and leave nothing behind.

    Args:
        config: resolved, without ``auto``.
        announce: told of progress, readiness and the end; from this thread or another.
    Returns:
        The process's exit code.
    Raises:
        ConfigurationError: the address, the model or what was asked of it cannot be served.
    """
    server = make_server(config.max_message_bytes)
    address = bind(server, config.listen)
    control_plane = ControlPlane(config, server, address, announce)
    with StopSignals() as signals:
        try:
            return await control_plane.run(signals)
        finally:
            await control_plane.end()


class _Interrupted(Exception):
    """A signal came while starting."""


class ControlPlane:
    """One control plane process. Owns the order of starting and stopping, nothing else."""

    def __init__(self, config: ControlPlaneConfig, server: grpc.aio.Server, address: str, announce: Announce) -> None:
        self._config = config
        self._server = server
        self._address = address
        self._announce = announce
        self._started_at = time.monotonic()
        self._seat = EngineSeat("starting")
        self._group: WorkerGroup | None = None
        self._engine: Engine | None = None
        self._loop: asyncio.Task[None] | None = None  # the engine's
        self._stopping = threading.Event()  # read by the thread that fetches a model
        self._lost = asyncio.Event()
        self._loss = ""

    async def run(self, signals: StopSignals) -> int:
        """Start, serve, stop."""
        try:
            place = await _unless_stopped(
                asyncio.to_thread(resolve_model, self._config.model, self._model_progress), signals
            )
            text = await _unless_stopped(asyncio.to_thread(load_model_text, place.path), signals)
            await self._open_doors(place, text)
            facts = await _unless_stopped(self._form(place), signals)
        except _Interrupted:
            self._stopping.set()
            return exit_codes.INTERRUPTED if signals.first is signal.SIGINT else exit_codes.OK
        except GroupNotFormed as error:
            log.error("group.not_formed", reason=error.loss.reason)
            self._announce(Stopping(error.loss.reason))
            return exit_codes.FAILURE
        except InvalidParameter as error:  # a worker refused the model
            raise ConfigurationError([(error.field, self._config.model, error.rule)]) from error
        self._start_engine(text, facts)
        self._announce(
            Ready(
                address=self._address,
                model=self._config.served_model_name[0],
                max_model_len=facts.max_model_len,
                num_blocks=facts.num_blocks - 1,
                block_size=facts.block_size,
            )
        )
        await _first(signals.stop.wait(), self._lost.wait())
        if self._lost.is_set():
            self._announce(Stopping(self._loss))
            return exit_codes.GROUP_LOST
        await self._drain_for(signals)
        return exit_codes.OK

    async def end(self) -> None:
        """End the group, then the calls that still wait, then the server."""
        self._seat.leave("shutting down")
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        if self._group is not None:
            await self._group.teardown("the control plane shuts down")
        await self._server.stop(_FAREWELL_S)
        if self._config.listen.startswith("unix:"):
            with suppress(FileNotFoundError):
                os.unlink(self._config.listen.removeprefix("unix:"))

    # Starting

    def _model_progress(self, what: str, share: float, detail: str) -> None:
        if self._stopping.is_set():  # ends the program that fetches or converts
            raise _Interrupted
        self._seat.report(f"{what} {share:.0%}")
        self._announce(StageProgress(what, Rank(0), share, detail))

    def _stage_progress(self, stage: str, rank: Rank, share: float, detail: str) -> None:
        self._seat.report(f"rank {rank}: {stage} {share:.0%}")
        self._announce(StageProgress(stage, rank, share, detail))

    async def _open_doors(self, place: ModelPlace, text: ModelText) -> None:
        config, seat = self._config, self._seat
        served = ServedModel(names=config.served_model_name, source=place.source, text=text)
        release = version("maniple")
        new_seed = draw_seed if config.seed is None else partial(random.Random(config.seed).getrandbits, 64)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            inference.InferenceDoor(seat, served, new_seed=new_seed), self._server
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            vllm_engine.VllmEngineDoor(seat, served, version=release, new_seed=new_seed), self._server
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            admin.AdminDoor(seat, served, version=release, drain=self._drain, uptime_s=self._uptime_s), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthDoor(seat, SERVICES), self._server)
        add_reflection(self._server, SERVICES)
        await self._server.start()
        log.info("server.started", address=self._address)

    async def _form(self, place: ModelPlace) -> GroupFacts:
        config = self._config
        self._group = build_group(config, place.path, self._address)
        return await self._group.form(self._stage_progress)

    def _start_engine(self, text: ModelText, facts: GroupFacts) -> None:
        assert self._group is not None
        self._engine = build_engine(self._config, self._group, facts, text.tokenizer)
        self._engine.on_lost = self._on_lost
        self._loop = asyncio.create_task(self._engine.run(), name="engine")
        self._loop.add_done_callback(self._on_loop_done)
        self._seat.take(self._engine)
        log.info(
            "engine.started", epoch=facts.epoch, num_blocks=facts.num_blocks, formed_in_s=round(facts.formed_in_s, 3)
        )

    # Stopping

    def _on_lost(self, loss: LossReason) -> None:
        self._loss = loss.reason
        self._lost.set()

    def _on_loop_done(self, loop: asyncio.Task[None]) -> None:
        """End the clients when the engine's loop failed: a defect of ours must not become a silent hang."""
        error = None if loop.cancelled() else loop.exception()
        if error is not None and self._engine is not None:
            log.error("engine.failed", exc_info=error)
            self._engine.fail(LossReason(None, f"the control plane failed: {type(error).__name__}"))

    async def _drain_for(self, signals: StopSignals) -> None:
        """Let requests finish, at most for the drain timeout, or until a second signal."""
        assert self._engine is not None
        assert signals.first is not None
        status = self._engine.status()
        self._announce(Stopping(signals.first.name, status.num_running + status.num_waiting))
        drain = asyncio.create_task(self._drain(self._config.drain_timeout_s))
        await _first(_outcome(drain), signals.hurry.wait(), self._lost.wait())
        if not drain.done():
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            await self._engine.drain(0)

    async def _drain(self, timeout_s: float | None) -> int:
        assert self._engine is not None
        self._engine.close("draining")
        return await self._engine.drain(timeout_s)

    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at


async def _unless_stopped(work: Coroutine[Any, Any, T], signals: StopSignals) -> T:
    """Return what ``work`` returns; cancel it and raise ``_Interrupted`` when a signal comes first."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(signals.stop.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Interrupted
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return when the first of ``waits`` does; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _outcome(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})
