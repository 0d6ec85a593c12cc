"""Random, mutated and broken messages at every door: no crash, no hang, no INTERNAL, and the next request is served.

Ten seconds a door with a fixed seed; ``make fuzz`` gives each two minutes with a new one and prints it. A failure says
which environment variables repeat it.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2

from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, sampling_pb2, scheduler_delta_pb2, worker_pb2
from maniple.v1.inference_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenIds
from maniple.v1.worker_pb2 import StepsRequest
from support.fuzz_door import Case, Door, Good, fuzz, reflected, seed_and_seconds
from support.fuzz_frames import break_frames
from support.fuzz_messages import mutated_fields
from support.scripted_reference import greedy
from support.serve_process import Caller, ServeProcess
from support.worker_process import DeltaMaker, WorkerProcess, worker_process

INFERENCE = "maniple.v1.InferenceService"
ADMIN = "maniple.v1.AdminService"
VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
KSERVE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
DOORS = (INFERENCE, ADMIN, VLLM_ENGINE, KSERVE, HEALTH)
# gRPC's own code, which answers as it likes.
NOT_OURS = {
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.channelz.v1.Channelz",
}

# Of what a peer sends only so much gets into a line of the log.
MAX_LOG_LINE = 8000
_GONE_WITHIN_S = 5.0  # a rank that was told to go; it takes one second at most
PROMPT = [5, 250, 17, 0, 5]


def _generate(rng: Random) -> GenerateRequest:
    sampling = sampling_pb2.SamplingParams(max_tokens=rng.choice((1, 5, 40)), n=rng.choice((1, 3)), ignore_eos=True)
    request = GenerateRequest(request_id=f"r{rng.randrange(10**12)}", sampling=sampling)
    match rng.randrange(3):
        case 0:
            request.text = "Once upon"
        case 1:
            request.token_ids.CopyFrom(TokenIds(ids=PROMPT))
        case _:
            request.chat.CopyFrom(ChatPrompt(messages=[ChatMessage(role="user", content="hi")]))
    return request


def _structured(rng: Random) -> GenerateRequest:
    request = _generate(rng)
    constraint = request.sampling.structured_output
    match rng.randrange(6):
        case 0:
            constraint.json_schema = '{"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}'
        case 1:
            constraint.json_object = True
        case 2:
            constraint.regex = "[a-z]{1,3}(x|y)+"
        case 3:
            constraint.grammar = rng.choice(('root ::= "a" | root "b"', "start: /x+/ start | /y/"))
        case 4:
            constraint.choice.options.extend(["yes", "no"])
        case _:
            constraint.structural_tag = '{"structures": [], "triggers": []}'
    return request


def _vllm_generate(rng: Random) -> Message:
    return vllm_engine_pb2.GenerateRequest(
        request_id=f"v{rng.randrange(10**12)}",
        tokenized=vllm_engine_pb2.TokenizedInput(original_text="hi", input_ids=PROMPT),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=5, n=1, top_p=1.0, repetition_penalty=1.0),
        stream=rng.random() < 0.5,
    )


def _kserve_infer(rng: Random) -> Message:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name="scripted", id=str(rng.randrange(10**6)))
    parameters = json.dumps({"max_tokens": 5, "ignore_eos": True}).encode()
    for name, kind, value in (
        ("text_input", "BYTES", b"hi"),
        ("stream", "BOOL", None),
        ("sampling_parameters", "BYTES", parameters),
    ):
        tensor = request.inputs.add(name=name, datatype=kind, shape=[1])
        if value is None:
            tensor.contents.bool_contents.append(rng.random() < 0.5)
        else:
            tensor.contents.bytes_contents.append(value)
    return request


GOOD: dict[str, dict[str, list[Good]]] = {
    INFERENCE: {
        "Generate": [_generate, _generate, _structured],
        "Resume": [lambda rng: inference_pb2.ResumeRequest(request_id="r1", resume_token="token")],
        "Abort": [lambda rng: inference_pb2.AbortRequest(request_id="r1")],
        "Tokenize": [lambda rng: inference_pb2.TokenizeRequest(text="hello")],
        "Detokenize": [lambda rng: inference_pb2.DetokenizeRequest(token_ids=[104, 105])],
        "Embed": [lambda rng: inference_pb2.EmbedRequest(text="hello")],
    },
    ADMIN: {
        "PauseGeneration": [lambda rng: admin_pb2.PauseGenerationRequest(mode=rng.choice((1, 2, 3)))],
        "Sleep": [lambda rng: admin_pb2.SleepRequest(level=rng.choice((0, 1, 2)), mode=rng.choice((1, 2, 3)))],
    },
    VLLM_ENGINE: {"Generate": [_vllm_generate]},
    KSERVE: {"ModelInfer": [_kserve_infer], "ModelStreamInfer": [_kserve_infer]},
}
# What stops a server from serving is put right afterwards, at a cost.
# Health's own contract has no other answer for a service that it does not know.
BARE = {HEALTH: [grpc.StatusCode.NOT_FOUND]}
RARELY = {ADMIN: {"Drain": 0.02, "PauseGeneration": 0.3, "Sleep": 0.3}}


class Served:
    """A server that is started anew when it was told to stop serving."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w+")
        self.path = log
        self._start()

    def _start(self) -> None:
        model = "scripted:" + json.dumps({"step_time_s": 0.0005})
        limits = ("--max-num-seqs", "8", "--num-kv-blocks", "200", "--max-num-waiting", "64")
        words = ("--model", model, "--served-model-name", "scripted", "--executor", "uni", *limits)
        self.process = ServeProcess(words, log=self._log)
        self.address = self.process.address

    async def is_well(self) -> None:
        """One request gets its known tokens, and nothing else is left running."""
        assert self.process.process.poll() is None, f"it ended with {self.process.process.poll()}"
        try:
            await self._listens()
            async with Caller(self.process) as caller, asyncio.timeout(30):
                while True:
                    (group,) = (await caller.status()).groups
                    if group.num_running == group.num_waiting == 0:
                        break
                    await asyncio.sleep(0.01)
                stream = await caller.generate("", PROMPT, 3).end()
                assert stream.token_ids == greedy(PROMPT, 3), stream.error
        except TimeoutError:
            self.process.signal(signal.SIGABRT)  # it says where each of its threads is
            self.process.exit_code()
            raise AssertionError(f"it does not answer: {self.path.read_text()[-6000:]}") from None
        said = self.path.read_text()
        assert "Traceback" not in said, said[-3000:]
        longest = max(said.splitlines(), key=len, default="")
        assert len(longest) < MAX_LOG_LINE, f"{len(longest)} characters in a line of the log: {longest[:2000]}"

    async def _listens(self) -> None:
        """Wait through the moment in which a server listens anew, see surviving_server.py."""
        async with asyncio.timeout(2), grpc.aio.insecure_channel(self.address) as channel:
            await channel.channel_ready()

    async def put_right(self, case: Case) -> None:
        """Undo what an operator's call was meant to do."""
        name = case.method.path.rpartition("/")[2]
        if name == "Drain" and not case.outcome.startswith("INVALID_ARGUMENT"):
            self.close()
            self._start()
        elif name in ("PauseGeneration", "Sleep", "WakeUp"):
            async with grpc.aio.insecure_channel(self.address) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                if (await admin.IsSleeping(admin_pb2.IsSleepingRequest(), timeout=10)).is_sleeping:
                    await admin.WakeUp(admin_pb2.WakeUpRequest(), timeout=10)
                if (await admin.IsPaused(admin_pb2.IsPausedRequest(), timeout=10)).is_paused:
                    await admin.ResumeGeneration(admin_pb2.ResumeGenerationRequest(), timeout=10)

    def close(self) -> None:
        self.process.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    one = Served(tmp_path / "log")
    yield one
    one.close()


def test_every_door_that_a_server_has_is_fuzzed(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        _, services = reflected(channel)
    assert services - NOT_OURS == set(DOORS)


@pytest.mark.parametrize("service", DOORS)
@pytest.mark.timeout(0)  # as long as it is told to take
async def test_door_survives_whatever_comes(service: str, served: Served) -> None:
    seed, seconds = seed_and_seconds()
    with grpc.insecure_channel(served.address) as channel:
        pool, _ = reflected(channel)
        door = Door(service, pool, good=GOOD.get(service), rarely=RARELY.get(service), bare=BARE.get(service, ()))
    fuzzed = await fuzz(
        door,
        lambda: served.address,
        seed=seed,
        seconds=seconds,
        check=served.is_well,
        after=served.put_right,
    )
    # It came past the first check at least: some calls are answered.
    assert fuzzed.outcomes["OK"], fuzzed
    assert fuzzed.num_cases > seconds


async def test_server_survives_broken_frames(served: Served) -> None:
    seed, seconds = seed_and_seconds()
    good = GenerateRequest(text="hi", sampling=sampling_pb2.SamplingParams(max_tokens=3)).SerializeToString()
    paths = (
        f"/{INFERENCE}/Generate",
        f"/{INFERENCE}/GetModel",
        f"/{ADMIN}/GetStatus",
        f"/{VLLM_ENGINE}/Generate",
        "/x/y",
    )
    await break_frames(served.address, paths, good, seed=seed, seconds=seconds / 2, check=served.is_well)


# The door of a worker. It stands open to control planes only, which are as wrong as anybody now and then.

WORKER = "maniple.v1.WorkerService"


def _steps(rng: Random) -> list[Message]:
    """A stream in good order: hello, some deltas with rows that come and go, heartbeats between, perhaps a goodbye."""
    said = [StepsRequest(epoch=1, hello=StepsRequest.Hello(owner_id="A"))]
    maker = DeltaMaker()
    for number in range(rng.choice((1, 3, 8))):
        wire = maker.make(new={number % 4: PROMPT} if number < 4 else {}, finished=[number - 4] if number >= 4 else ())
        if rng.random() < 0.3:
            delta = scheduler_delta_pb2.SchedulerDelta.FromString(wire)
            wire = mutated_fields(rng, delta).SerializeToString()
        said.append(StepsRequest(epoch=1, delta=wire))
        if rng.random() < 0.3:
            said.append(StepsRequest(epoch=1, heartbeat=StepsRequest.Heartbeat()))
    if rng.random() < 0.2:
        kind = rng.choice(list(StepsRequest.Goodbye.Kind.values()))
        said.append(StepsRequest(epoch=1, goodbye=StepsRequest.Goodbye(kind=kind)))
    return list(said)


def _in_epoch(kind: type[Message]) -> list[Good]:
    return [lambda rng: kind(epoch=rng.choice((1, 1, 1, 2)))]  # type: ignore[call-arg]


WORKER_GOOD: dict[str, list[Good]] = {
    "Join": [lambda rng: worker_pb2.JoinRequest(epoch=rng.choice((1, 2)), owner_id=rng.choice("AB"), world_size=1)],
    "FormGroup": [lambda rng: worker_pb2.FormGroupRequest(epoch=1, formation_id="f1", world_size=1)],
    "LoadModel": [lambda rng: worker_pb2.LoadModelRequest(epoch=1, model="scripted", max_num_seqs=5, block_size=4)],
    "ProfileMemory": _in_epoch(worker_pb2.ProfileMemoryRequest),
    "AllocateKvCache": _in_epoch(worker_pb2.AllocateKvCacheRequest),
    "WarmUp": _in_epoch(worker_pb2.WarmUpRequest),
    "FetchDeltas": _in_epoch(worker_pb2.FetchDeltasRequest),
    "Snapshot": _in_epoch(worker_pb2.SnapshotRequest),
    "Leave": _in_epoch(worker_pb2.LeaveRequest),
}


class Ranks:
    """A rank that is ready, with owner A in epoch 1; another one when something that came has changed that."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = AsyncExitStack()
        self.num_started = 0
        self.worker: WorkerProcess

    async def renew(self) -> None:
        await self._stack.aclose()
        self.num_started += 1
        directory = self._directory / str(self.num_started)
        directory.mkdir()
        self.address = f"unix:{directory}/w.sock"
        self.worker = await self._stack.enter_async_context(worker_process(directory))
        await self.worker.make_ready()

    async def is_well(self) -> None:
        """It runs and answers, or was told to go and did. One that cannot serve any more is replaced."""
        code = self.worker.process.returncode
        if code is None and (described := await self._describe()) is not None:
            if described.epoch == 1 and described.stage == worker_pb2.WORKER_STAGE_READY:
                return
        else:
            code = await self.worker.exit_code(within_s=10)
            where = "".join(line.get("event", "") for line in self.worker.log)
            assert code == 0, f"it does not answer, or ended, with {code}: {where[-6000:]}"
        said = [str(line) for line in self.worker.log]
        crashed = [line for line in said if "Traceback" in line]
        assert not crashed, "\n".join(said)[-6000:]
        longest = max(said, key=len, default="")
        assert len(longest) < MAX_LOG_LINE, f"{len(longest)} characters in a line of the log: {longest[:2000]}"
        await self.renew()

    async def _describe(self) -> worker_pb2.DescribeResponse | None:
        """Ask it what it is; None if it does not answer, and then it has ended, or is made to say where it stands."""
        asked, ended = asyncio.ensure_future(self.worker.describe()), asyncio.ensure_future(self.worker.process.wait())
        await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        is_answered = asked.done() and asked.exception() is None
        if not is_answered:  # told to go it ends the calls that run, and is gone a moment later
            await asyncio.wait({ended}, timeout=_GONE_WITHIN_S)
        for one in (asked, ended):
            one.cancel()
        if is_answered:
            return asked.result()
        if self.worker.process.returncode is None:
            self.worker.process.send_signal(signal.SIGABRT)
        return None

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.mark.timeout(0)
async def test_worker_survives_whatever_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    seed, seconds = seed_and_seconds()
    ranks = Ranks(tmp_path)
    try:
        await ranks.renew()
        door = Door(
            WORKER,
            descriptor_pool.Default(),
            good=WORKER_GOOD,
            sequences={"Steps": _steps},
            rarely={"Steps": 8.0, "Leave": 0.1},
        )
        fuzzed = await fuzz(door, lambda: ranks.address, seed=seed, seconds=seconds, check=ranks.is_well)
    finally:
        await ranks.close()
    assert fuzzed.outcomes["OK"], fuzzed
