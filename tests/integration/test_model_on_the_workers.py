"""A model whose directory only the workers have: tokenizer, template and configuration come from rank 0."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import grpc

from control_plane.text.tokenizer import Tokenizer
from maniple.v1 import inference_pb2, inference_pb2_grpc
from maniple_client import AsyncClient, Chunk
from support.takeover import ControlPlane, Ready, StageProgress, site
from support.tiny_checkpoints import tiny_config, write_checkpoint
from support.waiting import until

# The same absolute path leads each process elsewhere: only the worker was started where the model is.
MODEL = "/proc/self/cwd/the-model"
FLAGS = ("--model", MODEL, "--tensor-parallel-size", "1", "--max-num-batched-tokens", "64")


def write_model(directory: Path) -> None:
    tokenizer = Tokenizer.for_scripted()
    write_checkpoint(directory, tiny_config("LlamaForCausalLM", vocab_size=tokenizer.vocab_size))
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 9}))


async def text_of(client: AsyncClient, pieces: list[str] | None = None, **request: object) -> str:
    """Generate; ``pieces`` shows what came so far."""
    pieces = [] if pieces is None else pieces
    async with client.generate(ignore_eos=True, **request) as events:  # type: ignore[arg-type]
        async for event in events:
            if isinstance(event, Chunk):
                pieces.append(event.text)
    return "".join(pieces)


async def described(control_plane: ControlPlane) -> inference_pb2.GetModelResponse:
    async with grpc.aio.insecure_channel(control_plane.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await stub.GetModel(inference_pb2.GetModelRequest(), timeout=5)


async def test_model_that_only_the_worker_has_is_served_and_taken_over(tmp_path: Path) -> None:
    write_model(tmp_path / "worker" / "the-model")
    async with site(tmp_path, world_size=1, worker_cwd=tmp_path / "worker") as here:
        owner, spare = await here.owner_and_spare(*FLAGS)
        async with here.client() as client, asyncio.timeout(90):
            info = await described(owner)
            assert (info.architecture, info.has_chat_template) == ("LlamaForCausalLM", True)
            assert list(info.served_names) == ["the-model"]
            by_text = await text_of(client, prompt="<hello>")
            assert len(by_text.encode()) >= 9  # as many tokens as its generation_config.json says, of a byte each
            assert await text_of(client, messages=[{"role": "user", "content": "hello"}]) == by_text
            # A spare has no use for them yet, and has them: taking over must not wait for a tokenizer.
            await until(lambda: spare.events("model_files.fetched"), "the spare's files")
            pieces: list[str] = []
            running = asyncio.create_task(text_of(client, pieces, prompt="<go on>", max_tokens=400))
            await until(lambda: len(pieces) >= 5, "tokens")
            owner.signal(signal.SIGKILL)
            await spare.heard(Ready)
            assert not running.done()
            whole = await running
            assert spare.events("group.adopted")
            assert not spare.times(StageProgress, "load")
            assert await text_of(client, prompt="<go on>", max_tokens=400) == whole
            assert await text_of(client, prompt="<hello>") == by_text


async def test_model_that_nobody_has_is_refused_in_the_words_of_the_worker(tmp_path: Path) -> None:
    async with site(tmp_path, world_size=1) as here:
        nowhere = here.control_plane("a", *FLAGS)
        assert await nowhere.exit_code(30) == 2
        assert f"--model {MODEL}: must be a directory where the workers run" in nowhere.log()
        relative = here.control_plane("b", *FLAGS, "--model", "./the-model")
        assert await relative.exit_code(30) == 2
        assert "does not exist here, and a directory on the workers must begin with /" in relative.log()
