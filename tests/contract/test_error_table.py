"""The one table of errors, row by row through every door: status, details, size on the wire, in-band form.

The table is written out here once more, by hand from the design, so that a change of a row is a change of two places.
A new door is one more entry of ``DOORS``; what is tried on one is tried on all.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2
from tritonclient.grpc import service_pb2, service_pb2_grpc

from control_plane.generation import Event, Generation, Started
from control_plane.generation_stream import GenerationStream
from control_plane.pause import PauseMode
from maniple.v1 import admin_pb2, errors_pb2
from maniple.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenizeRequest
from maniple.v1.sampling_pb2 import SamplingParams
from service_chassis import errors
from service_chassis.errors import ManipleError
from support.fake_engine import Doors, open_doors
from support.logs import captured_log
from support.real_doors import real_doors
from support.waiting import until

# class: (status, reason), as DESIGN and docs/errors.md have them.
TABLE: dict[type[ManipleError], tuple[str, str]] = {
    errors.InvalidParameter: ("INVALID_ARGUMENT", "INVALID_PARAMETER"),
    errors.UnknownModel: ("NOT_FOUND", "UNKNOWN_MODEL"),
    errors.UnknownLora: ("NOT_FOUND", "UNKNOWN_LORA"),
    errors.UnknownRequest: ("NOT_FOUND", "UNKNOWN_REQUEST"),
    errors.DuplicateRequest: ("ALREADY_EXISTS", "DUPLICATE_REQUEST"),
    errors.QueueFull: ("RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    errors.NotReady: ("UNAVAILABLE", "NOT_READY"),
    errors.GroupLostBeforeStart: ("UNAVAILABLE", "GROUP_LOST"),
    errors.GroupLost: ("ABORTED", "GROUP_LOST"),
    errors.TakenOver: ("ABORTED", "TAKEN_OVER"),
    errors.Superseded: ("ABORTED", "SUPERSEDED"),
    errors.ResumeLost: ("DATA_LOSS", "RESUME_LOST"),
    errors.EventsLost: ("DATA_LOSS", "EVENTS_LOST"),
    errors.OutOfOrder: ("ABORTED", "OUT_OF_ORDER"),
    errors.Fenced: ("FAILED_PRECONDITION", "FENCED"),
    errors.LeaseHeld: ("FAILED_PRECONDITION", "LEASE_HELD"),
    errors.DeltaRefused: ("INVALID_ARGUMENT", "DELTA_REFUSED"),
    errors.Cancelled: ("CANCELLED", "CANCELLED"),
    errors.DeadlineExceeded: ("DEADLINE_EXCEEDED", "DEADLINE"),
    errors.NotBuilt: ("UNIMPLEMENTED", "NOT_BUILT"),
    errors.WrongState: ("FAILED_PRECONDITION", "WRONG_STATE"),
    errors.Unauthenticated: ("UNAUTHENTICATED", "UNAUTHENTICATED"),
    errors.PermissionDenied: ("PERMISSION_DENIED", "PERMISSION_DENIED"),
    errors.InternalError: ("INTERNAL", "INTERNAL"),
}
MAX_TRAILER_BYTES = 4096


def every_class(of: type[ManipleError] = ManipleError) -> set[type[ManipleError]]:
    found = {one for direct in of.__subclasses__() for one in (direct, *every_class(direct))}
    return {one for one in found if one.__module__ == errors.__name__}  # others narrow a row, as the worker does


def made(row: type[ManipleError], message: str = "what went wrong") -> ManipleError:
    """An error of a row, with all that its kind carries."""
    if row is errors.InternalError:
        return errors.InternalError()
    if row is errors.InvalidParameter:
        return errors.InvalidParameter("sampling.top_p", 7, message)
    retry_after_s = 1.5 if row is errors.QueueFull else None
    metadata = {"owner_address": "10.0.0.7:50051"} if row is errors.TakenOver else {}
    return row(message, metadata=metadata, retry_after_s=retry_after_s)


@dataclass
class Told:
    """What a client was told of a failure."""

    error: grpc.aio.AioRpcError
    in_band: list[errors_pb2.StreamError] = field(default_factory=list)
    num_answers: int = 0  # before it

    @property
    def status(self) -> status_pb2.Status:
        raw = dict(self.error.trailing_metadata() or ())["grpc-status-details-bin"]
        assert isinstance(raw, bytes)
        return status_pb2.Status.FromString(raw)

    def detail(self, kind: type[Any]) -> Any:
        """The one detail of a kind, None where there is none."""
        found = [kind.FromString(any_.value) for any_ in self.status.details if any_.Is(kind.DESCRIPTOR)]
        assert len(found) <= 1
        return found[0] if found else None

    def wire_bytes(self) -> int:
        """All metadata of the end of the call, as HTTP/2 has it: names, values, binary ones in base64."""
        total = len("grpc-status") + 2 + len("grpc-message")
        message = (self.error.details() or "").encode()
        total += sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in message)
        for key, value in self.error.trailing_metadata() or ():
            total += len(key) + (len(value) + 2) // 3 * 4
        return total


async def failure(call: Any) -> Told:
    """Read a call to its bad end."""
    in_band, count = [], 0
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for answer in call:
                count += 1
                if isinstance(answer, GenerateResponse) and answer.HasField("error"):
                    in_band.append(answer.error)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return Told(error, in_band, count)
    raise AssertionError("it went well")


def fails_with(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


# Doors: how an error comes out of each. The name says door and way.


async def inference_admission(doors: Doors, error: Exception) -> Told:
    doors.engine.generate = fails_with(error)  # type: ignore[method-assign]
    return await failure(doors.inference.Generate(GenerateRequest(text="hi")))


async def inference_stream(doors: Doors, error: Exception) -> Told:
    _fail_half_way(doors, error)
    return await failure(doors.inference.Generate(GenerateRequest(text="hi")))


async def inference_unary(doors: Doors, error: Exception) -> Told:
    doors.engine.limits = _Failing(error)  # type: ignore[assignment]
    return await failure(doors.inference.Tokenize(TokenizeRequest(text="hi")))


async def vllm_admission(doors: Doors, error: Exception) -> Told:
    doors.engine.generate = fails_with(error)  # type: ignore[method-assign]
    return await failure(doors.vllm.Generate(_vllm_request()))


async def vllm_stream(doors: Doors, error: Exception) -> Told:
    _fail_half_way(doors, error)
    return await failure(doors.vllm.Generate(_vllm_request()))


async def vllm_unary(doors: Doors, error: Exception) -> Told:
    doors.fleet.status = fails_with(error)  # type: ignore[method-assign]
    return await failure(doors.vllm.GetLoads(vllm_engine_pb2.GetLoadsRequest()))


async def kserve_admission(doors: Doors, error: Exception) -> Told:
    doors.engine.generate = fails_with(error)  # type: ignore[method-assign]
    return await failure(_kserve(doors).ModelInfer(_kserve_request()))


async def kserve_half_way(doors: Doors, error: Exception) -> Told:
    _fail_half_way(doors, error)
    return await failure(_kserve(doors).ModelInfer(_kserve_request()))


async def admin_unary(doors: Doors, error: Exception) -> Told:
    doors.fleet.status = fails_with(error)  # type: ignore[method-assign]
    return await failure(doors.admin.GetStatus(admin_pb2.GetStatusRequest()))


async def admin_stream(doors: Doors, error: Exception) -> Told:
    doors.fleet.status = fails_with(error)  # type: ignore[method-assign]
    return await failure(doors.admin.Drain(admin_pb2.DrainRequest()))


Door = Callable[[Doors, Exception], Awaitable[Told]]
DOORS: list[Door] = [
    inference_admission,
    inference_stream,
    inference_unary,
    vllm_admission,
    vllm_stream,
    vllm_unary,
    kserve_admission,
    kserve_half_way,
    admin_unary,
    admin_stream,
]
every_door = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)


def _fail_half_way(doors: Doors, error: Exception) -> None:
    if isinstance(error, ManipleError):
        doors.engine.error, doors.engine.error_after = error, 1
        return
    generate = doors.fleet.generate

    async def generate_and_break(generation: Generation) -> GenerationStream:
        return cast(GenerationStream, _Breaking(await generate(generation), error))

    doors.fleet.generate = generate_and_break  # type: ignore[method-assign]


class _Breaking:
    """A stream that fails after the start of its request, by a defect."""

    def __init__(self, stream: GenerationStream, error: Exception) -> None:
        self._stream = stream
        self._error = error
        self.generation, self.cancel = stream.generation, stream.cancel

    def __aiter__(self) -> _Breaking:
        return self

    async def __anext__(self) -> Event:
        if isinstance(event := await anext(self._stream), Started):
            return event
        raise self._error


class _Failing:
    """Whatever is asked of it fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def _vllm_request(**more: Any) -> vllm_engine_pb2.GenerateRequest:
    return vllm_engine_pb2.GenerateRequest(
        request_id="r", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=b"hi"), stream=True, **more
    )


def _kserve(doors: Doors) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(doors.channel)


def _kserve_request(request_id: str = "r", text: str = "hi", model: str = "fake") -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return request


# The table itself


def test_every_class_has_its_row_and_every_reason_its_class() -> None:
    assert every_class() == set(TABLE)
    reasons = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.DESCRIPTOR.values_by_name} - {
        "UNSPECIFIED"
    }
    assert {reason for _, reason in TABLE.values()} == reasons


def test_documents_say_the_same() -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    documented = set()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and re.fullmatch(r"[A-Z_]+", cells[2]):
            documented |= {(cells[2], reason) for reason in re.findall(r"`([A-Z_]+)`", cells[3])}
    between_services = {"OUT_OF_ORDER", "FENCED", "LEASE_HELD", "DELTA_REFUSED"}
    assert documented == {row for row in TABLE.values() if row[1] not in between_services}
    assert all(f"`{reason}`" in text for reason in between_services)


@every_door
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.__name__)
async def test_row_comes_out_of_a_door_as_the_table_has_it(row: type[ManipleError], door: Door) -> None:
    code, reason = TABLE[row]
    error = made(row)
    async with open_doors() as doors, asyncio.timeout(20):
        told = await door(doors, error)
    assert (told.error.code().name, told.error.details()) == (code, error.message)
    assert (told.status.code, told.status.message) == (told.error.code().value[0], error.message)
    info = told.detail(error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("maniple.dev", reason)
    assert dict(info.metadata) == error.metadata | ({"incident_id": error.incident_id} if error.incident_id else {})
    retry = told.detail(error_details_pb2.RetryInfo)
    assert (retry.retry_delay.ToMilliseconds() if retry else None) == (1500 if row is errors.QueueFull else None)
    bad = told.detail(error_details_pb2.BadRequest)
    violations = [(one.field, one.description) for one in bad.field_violations] if bad else []
    assert violations == ([("sampling.top_p", error.message)] if row is errors.InvalidParameter else [])
    assert told.wire_bytes() <= MAX_TRAILER_BYTES
    if door is inference_stream:
        (in_band,) = told.in_band  # one, and it is the last
        assert (in_band.code, in_band.message) == (told.status.code, error.message)
        assert errors_pb2.ErrorReason.Name(in_band.reason) == f"ERROR_REASON_{reason}"
        assert in_band.owner_address == error.metadata.get("owner_address", "")
    else:
        assert not told.in_band


@every_door
@pytest.mark.parametrize("text", ["x" * 9000, "é%\n" * 3000, "🙂" * 3000], ids=["ascii", "escaped", "four-bytes"])
async def test_details_keep_within_four_kilobytes_whatever_the_message(text: str, door: Door) -> None:
    longest = {"owner_address": text, "expected_step": text, "third": text}
    for error in (
        errors.QueueFull(text, metadata=longest, retry_after_s=2.0),
        errors.InvalidParameter("prompt", text, text),
    ):
        async with open_doors() as doors, asyncio.timeout(20):
            told = await door(doors, error)
        assert told.wire_bytes() <= MAX_TRAILER_BYTES
        assert (told.error.details() or "").endswith("…")
        assert len(told.error.details() or "") > 100  # somebody has to read it
        assert told.status.message == told.error.details()
        assert all(len(one.message.encode()) <= 2048 for one in told.in_band)


@every_door
async def test_text_of_an_unknown_exception_reaches_no_client_and_the_log_once(door: Door) -> None:
    async with open_doors() as doors, asyncio.timeout(20):
        with captured_log() as log:
            told = await door(doors, KeyError("/home/somebody/secret prompt"))
    assert told.error.code() is grpc.StatusCode.INTERNAL
    incident = told.detail(error_details_pb2.ErrorInfo).metadata["incident_id"]
    assert told.error.details() == f"internal error, incident {incident}"
    assert "secret" not in str(told.error.trailing_metadata())
    logged = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["incident_id"] for line in logged if "secret" in str(line)] == [incident]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.__name__)
async def test_row_ends_one_request_of_a_kserve_stream_and_no_other(row: type[ManipleError]) -> None:
    """Many requests share that stream, so its own status says nothing of one: a response of the request does."""
    code, _ = TABLE[row]
    error = made(row)
    async with open_doors() as doors, asyncio.timeout(20):
        doors.engine.output = [*b"ok", 256]  # the end of text
        doors.engine.error, doors.engine.error_after = error, 1
        stream = _kserve(doors).ModelStreamInfer()
        await stream.write(_kserve_request("bad"))
        answers = [await stream.read()]
        while not answers[-1].infer_response.parameters["triton_final_response"].bool_param:
            answers.append(await stream.read())
        assert answers[-1].error_message == f"{code}: {error.message}"
        assert {answer.infer_response.id for answer in answers} == {"bad"}
        assert not any(answer.error_message for answer in answers[:-1])
        doors.engine.error = None
        await stream.write(_kserve_request("good"))
        answer = await stream.read()
        assert (answer.infer_response.id, answer.error_message) == ("good", "")
        stream.cancel()


# What really causes each row, through the doors where it can come about. Queues, groups and takeovers have files of
# their own; here it is what a door sees of them.


def _sampling(**wanted: Any) -> GenerateRequest:
    return GenerateRequest(text="hi", sampling=SamplingParams(**wanted))


CAUSES: list[tuple[str, Callable[[Doors], Any], str]] = [
    ("bad parameter", lambda doors: doors.inference.Generate(_sampling(top_p=7.0)), "INVALID_PARAMETER"),
    ("empty prompt", lambda doors: doors.inference.Generate(GenerateRequest(text="")), "INVALID_PARAMETER"),
    ("long prompt", lambda doors: doors.inference.Generate(GenerateRequest(text="x" * 64)), "INVALID_PARAMETER"),
    ("id out of range", lambda doors: doors.inference.Generate(_sampling(stop_token_ids=[10**6])), "INVALID_PARAMETER"),
    ("no model", lambda doors: doors.inference.Generate(GenerateRequest(text="hi", model="x")), "UNKNOWN_MODEL"),
    (
        "vllm bad parameter",
        lambda doors: doors.vllm.Generate(_vllm_request(sampling_params={"top_p": 7.0})),
        "INVALID_PARAMETER",
    ),
    ("vllm no prompt", lambda doors: doors.vllm.Generate(vllm_engine_pb2.GenerateRequest()), "INVALID_PARAMETER"),
    ("vllm media", lambda doors: doors.vllm.Generate(_vllm_request(mm_inputs={})), "NOT_BUILT"),
    ("vllm profile", lambda doors: doors.vllm.StartProfile(common_pb2.StartProfileRequest()), "NOT_BUILT"),
    ("kserve no model", lambda doors: _kserve(doors).ModelInfer(_kserve_request(model="x")), "UNKNOWN_MODEL"),
    ("kserve empty prompt", lambda doors: _kserve(doors).ModelInfer(_kserve_request(text="")), "INVALID_PARAMETER"),
    ("admin sleep", lambda doors: doors.admin.Sleep(admin_pb2.SleepRequest(level=1)), "WRONG_STATE"),
    ("admin lora", lambda doors: doors.admin.LoadLora(admin_pb2.LoadLoraRequest(name="a")), "NOT_BUILT"),
    ("admin weights", lambda doors: doors.admin.UpdateWeights(admin_pb2.UpdateWeightsRequest()), "INVALID_PARAMETER"),
    ("admin profile", lambda doors: doors.admin.StopProfile(admin_pb2.StopProfileRequest()), "WRONG_STATE"),
    ("admin level", lambda doors: doors.admin.Sleep(admin_pb2.SleepRequest(level=9)), "INVALID_PARAMETER"),
    ("admin tag", lambda doors: doors.admin.WakeUp(admin_pb2.WakeUpRequest(tags=["all"])), "INVALID_PARAMETER"),
    ("admin deadline", lambda doors: doors.admin.Drain(admin_pb2.DrainRequest(deadline_s=-1)), "INVALID_PARAMETER"),
]


@pytest.mark.parametrize(("cause", "reason"), [one[1:] for one in CAUSES], ids=[one[0] for one in CAUSES])
async def test_cause_has_its_row_with_all_details(cause: Callable[[Doors], Any], reason: str) -> None:
    async with open_doors() as doors, asyncio.timeout(20):
        told = await failure(cause(doors))
    code = {reason: code for code, reason in TABLE.values()}[reason]
    assert (told.error.code().name, told.detail(error_details_pb2.ErrorInfo).reason) == (code, reason)
    violations = told.detail(error_details_pb2.BadRequest)
    assert bool(violations) == (reason == "INVALID_PARAMETER")
    if violations:
        (violation,) = violations.field_violations
        assert violation.field
        assert (told.error.details() or "").startswith(f"{violation.field}=")


@pytest.mark.parametrize("why", ["loading", "draining", "paused", "stuck"])
async def test_what_is_not_ready_refuses_through_every_door_that_needs_a_model(why: str) -> None:
    async with open_doors() as doors, asyncio.timeout(20):
        if why == "loading":
            doors.fleet.leave("loading weights 40 %")
        else:
            doors.engine.set_ready(False, why)
        calls = [doors.inference.Generate(GenerateRequest(text="hi")), doors.vllm.Generate(_vllm_request())]
        calls += [_kserve(doors).ModelInfer(_kserve_request())]
        if why == "loading":  # what needs no more than limits answers else
            calls += [
                doors.inference.Tokenize(TokenizeRequest(text="hi")),
                doors.vllm.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest()),
                doors.vllm.FlushCache(common_pb2.FlushCacheRequest()),
                doors.vllm.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
                doors.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest()),
            ]
        for call in calls:
            told = await failure(call)
            assert told.error.code() is grpc.StatusCode.UNAVAILABLE
            assert told.detail(error_details_pb2.ErrorInfo).reason == "NOT_READY"
            assert why in (told.error.details() or "")
            assert not told.num_answers
        assert (await doors.admin.GetStatus(admin_pb2.GetStatusRequest())).not_ready_reason


# At most once


@pytest.mark.parametrize("door", ["inference", "vllm"])
async def test_request_is_admitted_once_whatever_a_proxy_sends_again(door: str) -> None:
    """A proxy may send a call again until initial metadata came; it leaves when the request enters its first delta."""
    async with real_doors() as doors, asyncio.timeout(20):

        def send() -> Any:
            if door == "vllm":
                return doors.vllm.Generate(_vllm_request(sampling_params={"max_tokens": 2000, "ignore_eos": True}))
            return doors.generate("r", b"hi", 2000)

        async def refused() -> None:
            told = await failure(send())
            assert told.error.code() is grpc.StatusCode.ALREADY_EXISTS
            assert told.detail(error_details_pb2.ErrorInfo).reason == "DUPLICATE_REQUEST"
            assert not told.num_answers

        await doors.fleet.pause(PauseMode.KEEP)
        first = send()
        await until(lambda: doors.fleet.status().num_waiting == 1, "the first one waits")
        metadata = asyncio.ensure_future(first.initial_metadata())
        await refused()
        assert not metadata.done(), "whoever retries would stop here, and the request has not begun"
        first.cancel()  # what a proxy does before it tries again
        await until(lambda: doors.fleet.status().num_waiting == 0, "the first one is gone")
        second = send()
        await until(lambda: doors.fleet.status().num_waiting == 1, "the second one waits")
        doors.fleet.unpause()
        await second.initial_metadata()
        assert doors.fleet.status().num_running == 1
        await refused()
        second.cancel()
        await until(lambda: doors.fleet.status().num_running == 0, "the second one is gone")
        await refused()  # it began: nothing runs it again, unless its client says that it has given it up
        await doors.vllm.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r"]))
        third = send()
        await third.initial_metadata()
        third.cancel()
        await doors.running.settled()
