"""What callers send and get is in no log, whatever goes wrong, at the level that says most."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from control_plane.announcement import Lost, Ready
from maniple.v1 import inference_pb2
from maniple_client import AsyncClient, Client, ManipleError
from support.jwt_issuer import AUDIENCE, ISSUER, Issuer
from support.serve_process import serving

PROMPT, OUTPUT, STOP, SALT = "canary-prompt", "canary-output", "canary-stop", "canary-salt"
TOKEN, WRONG_TOKEN = "canary-token-0123456789ab", "canary-wrong-token-0123456"
SECRETS = ("canary", "63616e617279")  # in hex, too
FAULT_STEP = 60


async def _good_and_bad_requests(client: AsyncClient) -> list[str]:
    """Send what works and what does not; return the resume tokens."""
    resume_tokens = []
    for options in (
        {"prompt": PROMPT, "detach_grace_s": 1.0},
        {"messages": [{"role": "user", "content": PROMPT}], "detach_grace_s": 1.0},
        {"prompt": PROMPT, "stop": [STOP], "cache_salt": SALT, "logprobs": 3},
        {"prompt": PROMPT, "allowed_token_ids": list(b"canary")},
        # Refused, each with the value in the sentence that the client gets.
        {"prompt": PROMPT, "stop": [STOP] * 1000},
        {"prompt": PROMPT, "cache_salt": SALT * 100},
        {"prompt": PROMPT * 10_000},
        {"prompt": PROMPT, "model": PROMPT},
        {"prompt": PROMPT, "temperature": -1.0},
        {"prompt": PROMPT, "request_id": f"{PROMPT} {PROMPT}"},
        {"messages": [{"role": "user", "content": PROMPT, "tool_call_id": PROMPT}, {"role": PROMPT, "content": ""}]},
        {"token_ids": [10**6]},
        {"prompt": PROMPT, "timeout_s": 0.001},
    ):
        stream = client.generate(**{"max_tokens": 12, "ignore_eos": True, **options})  # type: ignore[arg-type]
        try:
            async for _ in stream:
                pass
        except ManipleError:
            pass
        if stream.transcript.started is not None and stream.transcript.started.resume_token:
            resume_tokens.append(stream.transcript.started.resume_token)
    return resume_tokens


async def _raw_calls(address: str) -> None:
    """Send what no client of ours sends."""
    async with grpc.aio.insecure_channel(address) as channel:
        for method in ("maniple.v1.InferenceService/Generate", "maniple.v1.InferenceService/Resume"):
            for raw in (PROMPT.encode(), b"\xff" + PROMPT.encode()):
                for authorization in (f"Bearer {TOKEN}", f"Bearer {WRONG_TOKEN}", f"Basic {WRONG_TOKEN}"):
                    metadata = (("authorization", authorization),)
                    call = channel.unary_stream(f"/{method}")(raw, metadata=metadata, timeout=20)
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call.read()
        authorized = (("authorization", f"Bearer {TOKEN}"),)
        resume = inference_pb2.ResumeRequest(request_id="r", resume_token=b"canary-resume-to".hex())
        call = channel.unary_stream("/maniple.v1.InferenceService/Resume")(
            resume.SerializeToString(), metadata=authorized, timeout=20
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        for sampling in ({"json_schema": '{"canary": 1'}, {"regex": "canary("}, {"stop": [STOP]}):
            request = vllm_engine_pb2.GenerateRequest(
                request_id="v", text=PROMPT, sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=4, **sampling)
            )
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(
                    request, metadata=authorized, timeout=20
                ):
                    pass


async def test_logs_hold_no_prompt_output_salt_or_token(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    issuer = Issuer(tmp_path / "jwks.json")
    (tmp_path / "callers.toml").write_text(
        f'[[caller]]\nidentity = "team"\nscopes = ["inference", "admin"]\ntoken = "{TOKEN}"\n'
    )
    model = {"forced": list(OUTPUT.encode()), "faults": [{"rank": 0, "step": FAULT_STEP, "kind": "raise"}]}
    flags = ["--model", "scripted:" + json.dumps(model), "--executor", "mp", "--log-level", "debug"]
    flags += ["--auth-callers", str(tmp_path / "callers.toml"), "--auth-jwks", str(issuer.path)]
    flags += ["--auth-jwt-issuer", ISSUER, "--auth-jwt-audience", AUDIENCE]
    jwts = [issuer.token(), issuer.token(exp=1), issuer.token(aud="canary"), issuer.token()[:-8] + "canaryca"]
    with serving(*flags) as server:
        async with AsyncClient(server.address, token=TOKEN, resume_for_s=0) as client:
            secrets = [*SECRETS, *jwts, *(await _good_and_bad_requests(client))]
            assert len(secrets) > len(SECRETS) + len(jwts), "some can be resumed"
            await _raw_calls(server.address)
            for token in jwts:
                with Client(server.address, token=token) as another, contextlib.suppress(ManipleError):
                    another.tokenize(PROMPT)
            while not server.heard(Lost):  # a rank raises in the midst of it
                await _good_and_bad_requests(client)
            server.hear(Ready, 2)
            (tmp_path / "callers.toml").write_text(f'[[caller]]\nidentity = "team"\ntoken = "{TOKEN}')
            with pytest.raises(ManipleError):
                await client.tokenize(PROMPT, model=PROMPT)
    said = capfd.readouterr().err
    for event in ("request.finished", "step.failed", "rank.lost", "files.refused", "steps_stream.opened"):
        assert f'"{event}"' in said, f"the log is not what this test looks for: {event}"
    assert [line for line in said.splitlines() if any(secret in line for secret in secrets)] == []
