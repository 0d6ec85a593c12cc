"""Put one control plane together: model, groups, doors; serve until told to stop or no group is left."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from control_plane import exit_codes
from control_plane.announcement import Announcement, Lost, Ready, StageProgress, Stopping
from control_plane.assembly import build_engine, build_group
from control_plane.caller_share import CallerShare
from control_plane.config import ControlPlaneConfig
from control_plane.delta_recorder import DeltaRecorder
from control_plane.doors import admin, health, inference, kserve_extra, vllm_engine
from control_plane.doors.converters import draw_seed
from control_plane.doors.elsewhere import Elsewhere
from control_plane.doors.served_model import ServedModel
from control_plane.executors.selection import RAY, REMOTE
from control_plane.fleet import Fleet
from control_plane.group.allowance import Allowance
from control_plane.group.backoff import Backoff
from control_plane.group.loss import GroupNotFormed, LossReason
from control_plane.group.settings import GroupFacts
from control_plane.group.worker_group import WorkerGroup
from control_plane.group_keeper import GroupKeeper, OnGroupLoss, Prepare
from control_plane.handover import HandoverSettings
from control_plane.listeners import Listeners
from control_plane.metrics.meters import Meters
from control_plane.metrics.readings import ReadFleet
from control_plane.model_split import check_split
from control_plane.model_store import ModelPlace, resolve_model
from control_plane.openai_gateway import OpenAiGateway
from control_plane.relay import OwnerChannels, Relay
from control_plane.request_spans import RequestSpans
from control_plane.security import Security, load_security
from control_plane.security_rules import client_flags, knows_callers
from control_plane.span_export import SpanExport
from control_plane.step_trace import GroupTrace
from control_plane.stop_signals import StopSignals
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.text.model_text import load_model_text
from control_plane.text_on_workers import TextOnWorkers
from control_plane.trace_file import TraceFile
from maniple.v1 import admin_pb2_grpc, inference_pb2_grpc
from service_chassis.channelz import CHANNELZ, add_channelz
from service_chassis.errors import ConfigurationError, InvalidParameter
from service_chassis.frozen_heap import freeze_heap
from service_chassis.ids import Rank
from service_chassis.metrics_server import MetricsServer
from service_chassis.reflection import add_reflection
from service_chassis.server import check_free
from service_chassis.server_address import local_target
from service_chassis.telemetry import get_logger

log = get_logger()

T = TypeVar("T")
Announce = Callable[[Announcement], None]

SERVICES = (inference.SERVICE, vllm_engine.SERVICE, admin.SERVICE, health.SERVICE)
RELAYED_SERVICES = (inference.SERVICE, vllm_engine.SERVICE, kserve_extra.SERVICE)
# How long calls may take to end by themselves once nothing can come any more: their last words are on the way. Usually
# milliseconds; but what is cut off then is CANCELLED, and its client does not know where to go.
_FAREWELL_S = 3.0


async def serve(config: ControlPlaneConfig, *, announce: Announce) -> int:
    """Serve until SIGTERM, SIGINT or the loss of every group for good, and leave nothing behind.

    Args:
        config: resolved, without ``auto``.
        announce: told of progress, readiness and the end; from this thread or another.
    Returns:
        The process's exit code.
    Raises:
        ConfigurationError: the address, the model or what was asked of it cannot be served.
    """
    fleet = Fleet("starting")
    security = load_security(config)
    if knows_callers(config):
        max_waiting = config.max_waiting_per_caller or max(config.max_num_waiting // 2, 1)
        fleet.share = CallerShare(max_requests=config.max_requests_per_caller, max_waiting=max_waiting)
    channels = OwnerChannels(
        max_message_bytes=config.max_message_bytes, tls=security.relay_tls, token=security.relay_token
    )
    if config.openai_port:
        check_free(f"{config.listen.rpartition(':')[0]}:{config.openai_port}", "openai_port")
    relay = Relay(
        fleet,
        RELAYED_SERVICES,
        channels,
        answered_here=kserve_extra.ANSWERED_HERE,
        endless=(f"/{vllm_engine.SERVICE}/SubscribeKvEvents",),
    )
    listeners = Listeners(config, security, [relay])
    control_plane = ControlPlane(config, security, listeners, fleet, announce, Elsewhere(channels), relay)
    with StopSignals() as signals:
        try:
            code = await control_plane.run(signals)
        finally:
            await control_plane.end()
            await channels.close()
        signals.exit_code = code
    return code


class _Interrupted(Exception):
    """A signal came while starting."""


class ControlPlane:
    """One control plane process. Owns the order of starting and stopping, nothing else."""

    def __init__(
        self,
        config: ControlPlaneConfig,
        security: Security,
        listeners: Listeners,
        fleet: Fleet,
        announce: Announce,
        elsewhere: Elsewhere,
        relay: Relay,
    ) -> None:
        self._config = config
        self._worker_tls = security.worker_tls
        self._listeners = listeners
        self._address = listeners.address
        self._announce = announce
        self._elsewhere = elsewhere
        self._relay = relay
        self._started_at = time.monotonic()
        self._fleet = fleet
        self._health: health.HealthDoor | None = None
        self._allowance = Allowance(config.max_groups)
        self._keepers: list[GroupKeeper] = []
        self._keeping: list[asyncio.Task[LossReason]] = []  # one of each keeper
        self._news = asyncio.Event()  # a group's state has changed
        self._is_up = False  # ready was announced
        self._facts: dict[str, GroupFacts] = {}  # of every group as it was formed last, by its name
        self._stopping = threading.Event()  # read by the thread that fetches a model
        self._recorder: DeltaRecorder | None = None
        self._trace: TraceFile | None = None
        self._meters: Meters | None = None
        self._metrics: MetricsServer | None = None
        self._spans: SpanExport | None = None
        self._gateway: asyncio.Task[None] | None = None
        self._grammars: GrammarCompiler | None = None
        self._served: ServedModel | None = None

    async def run(self, signals: StopSignals) -> int:
        """Start, serve, stop."""
        if self._config.record_deltas:
            self._recorder = DeltaRecorder.at(self._config.record_deltas)
        if self._config.trace:
            self._trace = TraceFile.at(self._config.trace)
        self._open_observability()
        try:
            place = await _unless_stopped(asyncio.to_thread(self._find_model), signals)
            text = None
            if place.is_here:
                check_split(place.path, self._config.tensor_parallel_size)
                text = await _unless_stopped(asyncio.to_thread(load_model_text, place.path), signals)
            served = ServedModel(names=self._config.served_model_name, source=place.source, text=text)
            await self._open_doors(served)
            await _unless_stopped(self._start_keeping(place, served), signals)
        except _Interrupted:
            self._stopping.set()
            if self._fleet.is_serving:  # by a group that came up already, or through the owner of one
                await self._drain_for(signals)
                return exit_codes.OK
            return exit_codes.INTERRUPTED if signals.first is signal.SIGINT else exit_codes.OK
        except GroupNotFormed as error:
            log.error("group.not_formed", reason=error.loss.reason)
            self._announce(Stopping(error.loss.reason))
            return exit_codes.FAILURE
        except InvalidParameter as error:  # a worker refused the model
            value = getattr(self._config, error.field, self._config.model)
            raise ConfigurationError([(error.field, value, error.rule)]) from error
        self._is_up = True
        freeze_heap()  # tokenizer, contracts, modules: from here on there are only requests
        self._announce_ready()
        self._open_gateway()
        await _first(signals.stop.wait(), self._all_given_up())
        if not signals.stop.is_set():
            # The last one, if one after the other was; raises what a keeper failed with.
            loss = [task.result() for task in self._keeping if task.done()][-1]
            self._announce(Stopping(loss.reason))
            return exit_codes.GROUP_LOST
        await self._drain_for(signals)
        return exit_codes.OK

    async def end(self) -> None:
        """End the groups, then the calls that still wait, then the server."""
        await self._keep_no_more()
        await self._close_gateway()
        for keeper in self._keepers:
            self._fleet.leave("shutting down", keeper.name)
        await asyncio.gather(*(keeper.end("the control plane shuts down") for keeper in self._keepers))
        if self._grammars is not None:
            await self._grammars.close()
        if self._served is not None:
            self._served.close()
        if self._health is not None:
            self._health.end()
        await self._listeners.stop(_FAREWELL_S)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)

    # Starting

    def _open_observability(self) -> None:
        """Serve metrics from the first moment on, and be ready to send spans, as far as either is wanted."""
        config, release = self._config, version("maniple")
        if config.metrics_listen:
            name = config.served_model_name[0]
            self._meters = meters = Meters(name)
            read = ReadFleet(self._fleet, self._relay, meters, model_name=name, version=release)
            loop = asyncio.get_running_loop()
            self._metrics = MetricsServer(meters.board.metrics, read, loop, config.metrics_listen)
        if config.otlp_endpoint:
            self._spans = SpanExport(config.otlp_endpoint, version=release)

    def _find_model(self) -> ModelPlace:
        workers_elsewhere = self._config.executor in (REMOTE, RAY)
        return resolve_model(
            self._config.model,
            self._model_progress,
            workers_elsewhere=workers_elsewhere,
            keep_blocks=self._config.quantization != "none",
        )

    def _model_progress(self, what: str, share: float, detail: str) -> None:
        if self._stopping.is_set():  # ends the program that fetches or converts
            raise _Interrupted
        self._fleet.report(f"{what} {share:.0%}")
        self._announce(StageProgress(what, Rank(0), share, detail))

    async def _open_doors(self, served: ServedModel) -> None:
        config, fleet, doors, listeners = self._config, self._fleet, self._listeners.doors, self._listeners
        release = version("maniple")
        new_seed = draw_seed if config.seed is None else partial(random.Random(config.seed).getrandbits, 64)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            inference.InferenceDoor(fleet, served, new_seed=new_seed), doors
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            vllm_engine.VllmEngineDoor(fleet, served, version=release, new_seed=new_seed), doors
        )
        admin_door = admin.AdminDoor(
            fleet,
            served,
            version=release,
            drain=fleet.drain,
            uptime_s=self._uptime_s,
            profile_directory=config.profile_directory,
        )
        more = kserve_extra.open_door(doors, fleet, served, version=release, new_seed=new_seed)
        told = self._health = health.HealthDoor(fleet, (*SERVICES, *more))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin_door, doors)  # says where it is, if it is elsewhere
        health_pb2_grpc.add_HealthServicer_to_server(told, doors)
        at_doors = () if listeners.admin is not None else (CHANNELZ,)
        add_reflection(doors, (*SERVICES, *more, *at_doors))
        if listeners.admin is not None:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin_door, listeners.admin)
            health_pb2_grpc.add_HealthServicer_to_server(told, listeners.admin)
            add_reflection(listeners.admin, (admin.SERVICE, health.SERVICE, CHANNELZ))
        add_channelz(listeners.admin or doors)
        if listeners.probe is not None:
            health_pb2_grpc.add_HealthServicer_to_server(told, listeners.probe)
        await listeners.start()
        log.info("server.started", address=self._address)

    def _open_gateway(self) -> None:
        """Put the gateway for OpenAI clients beside us, if it is wanted. It learns of groups that come later itself."""
        config = self._config
        if config.openai_port:
            gateway = OpenAiGateway(
                host=config.listen.rpartition(":")[0],
                port=config.openai_port,
                server_address=local_target(self._address),
                announce=self._announce,
                log_level=config.log_level,
                log_json=config.log_format == "json",
            )
            self._gateway = asyncio.create_task(gateway.run(), name="openai-gateway")

    async def _close_gateway(self) -> None:
        """End it before the server that it calls."""
        if self._gateway is not None:
            self._gateway.cancel()
            (outcome,) = await asyncio.gather(self._gateway, return_exceptions=True)
            if isinstance(outcome, Exception):  # a defect, which ended nobody else
                log.error("openai_gateway.failed", exc_info=outcome)

    async def _start_keeping(self, place: ModelPlace, served: ServedModel) -> None:
        """Form all groups, side by side, until each is ours or another's. One that cannot be formed ends the start."""
        names = [str(index) for index in range(self._config.num_groups)]
        self._fleet.expect(names)
        self._grammars = GrammarCompiler(lambda: served.text)
        self._served = served
        prepare = None if place.is_here else TextOnWorkers(place.path, served.learn).learn
        self._keepers = [self._keeper(index, name, place, served, prepare) for index, name in enumerate(names)]
        self._fleet.on_readiness(lambda ready: self._news.set())
        for keeper in self._keepers:
            task = asyncio.create_task(self._keep(keeper), name=f"keeper-{keeper.name}")
            task.add_done_callback(lambda _: self._news.set())
            self._keeping.append(task)
        while not self._fleet.has_settled():
            for task in self._keeping:
                if task.done():
                    task.result()  # raises why its group cannot be formed
            self._news.clear()
            await self._news.wait()

    async def _keep(self, keeper: GroupKeeper) -> LossReason:
        """Bring a group to life and keep it so. One that was waited for may come long after the others."""
        try:
            facts = await keeper.start()
        except GroupNotFormed as error:
            if not self._is_up:
                raise
            return await keeper.run(error.loss)
        self._facts[keeper.name] = facts
        if self._is_up:
            self._announce_ready()
        return await keeper.run()

    def _keeper(
        self, index: int, name: str, place: ModelPlace, served: ServedModel, prepare: Prepare | None
    ) -> GroupKeeper:
        config = self._config
        group = name if config.num_groups > 1 else ""  # for people: one group needs no name

        trace = GroupTrace(self._trace, index) if self._trace is not None else None
        meters = self._meters.group(name) if self._meters is not None else None
        spans = RequestSpans(self._spans.tracer, config.served_model_name[0]) if self._spans is not None else None

        def formed_anew(facts: GroupFacts) -> None:
            self._facts[name] = facts
            self._announce_ready()

        def make_group() -> WorkerGroup:
            address = config.advertise_address or self._address
            made = build_group(
                config,
                place.path,
                address,
                group=index,
                recorder=self._recorder,
                worker_tls=self._worker_tls,
                trace=trace,
            )
            made.allowance = self._allowance
            return made

        return GroupKeeper(
            name,
            fleet=self._fleet,
            make_group=make_group,
            make_engine=lambda alive, adopted, survivors: build_engine(
                config,
                alive,
                adopted.facts,
                served.text.tokenizer,
                self._fleet.ids,
                adopted=adopted.snapshot,
                survivors=survivors,
                grammars=self._grammars,
                trace=trace,
                meters=meters,
                spans=spans,
            ),
            on_group_loss=OnGroupLoss(config.on_group_loss),
            backoff=Backoff(config.max_group_failures),
            prepare=prepare,
            progress=lambda stage, rank, share, detail: self._announce(
                StageProgress(stage, rank, share, detail, group)
            ),
            on_lost=lambda reason, retry_in_s: self._announce(Lost(reason, retry_in_s, group)),
            on_formed=formed_anew,
        )

    def _announce_ready(self) -> None:
        facts = list(self._facts.values())
        self._announce(
            Ready(
                address=self._address,
                model=self._config.served_model_name[0],
                max_model_len=min(one.max_model_len for one in facts),
                num_blocks=sum(one.num_blocks - 1 for one in facts),
                block_size=facts[0].block_size,
                client_flags=client_flags(self._config),
            )
        )

    # Stopping

    async def _all_given_up(self) -> None:
        """Return when no group is kept alive any more, or a keeper failed."""
        await asyncio.wait(self._keeping, return_when=asyncio.FIRST_EXCEPTION)

    async def _keep_no_more(self) -> None:
        """Form no group anew from now on; those that live go on."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def _drain_for(self, signals: StopSignals) -> None:
        """Let requests finish, here or handed over, at most for the drain timeout, or until a second signal."""
        assert signals.first is not None
        if self._config.handover:
            self._announce(Stopping(f"{signals.name}, handing over"))
            ending = asyncio.create_task(self._hand_over(), name="handover")
        else:
            ending = asyncio.create_task(self._drain(), name="drain")
            status = self._fleet.status()
            num_left = status.num_running + status.num_waiting
            self._announce(Stopping(signals.name, num_left, self._config.drain_timeout_s, again=signals.name))
        await self._keep_no_more()
        await _first(_outcome(ending), signals.hurry.wait())
        if not ending.done():
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
            self._fleet.abort_all()
            self._relay.end_all()
        else:
            ending.result()

    async def _drain(self) -> None:
        timeout_s = self._config.drain_timeout_s
        await asyncio.gather(self._fleet.drain(timeout_s), self._relay.drain(timeout_s))

    async def _hand_over(self) -> None:
        """Leave all groups to their next owners, and read on there for clients that cannot."""
        config = self._config
        self._fleet.close("handing over to another control plane")
        await self._keep_no_more()
        settings = HandoverSettings(
            step_timeout_s=config.step_timeout_s,
            resume_grace_s=config.resume_grace_s,
            drain_timeout_s=config.drain_timeout_s,
        )
        handovers = (keeper.hand_over(self._elsewhere, settings) for keeper in self._keepers)
        await asyncio.gather(*handovers, self._relay.drain(config.drain_timeout_s))

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
