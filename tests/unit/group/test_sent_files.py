"""What a rank sends as its model's files is bounded and checked, whoever that rank is."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from control_plane.executors.base import Executor, RankCallError
from control_plane.group import sent_files
from control_plane.group.loss import GroupNotFormed
from control_plane.group.sent_files import MAX_FILE_BYTES, fetch_model_files
from control_plane.text.model_files import TEXT_FILES, SentFiles
from control_plane.text.model_text import ModelText, text_of_files
from control_plane.text.tokenizer import Tokenizer
from control_plane.text_on_workers import TextOnWorkers
from maniple.v1 import worker_pb2
from service_chassis.errors import ConfigurationError, PermissionDenied
from service_chassis.ids import Rank

Part = worker_pb2.GetModelFilesResponse
NAMES = ("config.json", "tokenizer.json")


class Sender:
    """An executor whose rank 0 sends these parts, and then perhaps fails."""

    ranks = (Rank(0), Rank(1))

    def __init__(self, *parts: Part, error: Exception | None = None) -> None:
        self.parts, self.error = parts, error
        self.num_calls = 0

    async def stream(
        self, rank: Rank, method: str, request: worker_pb2.GetModelFilesRequest, *, timeout_s: float
    ) -> AsyncIterator[Part]:
        assert (rank, method) == (0, "GetModelFiles")
        self.num_calls += 1
        for part in self.parts:
            yield part
        if self.error is not None:
            raise self.error


def parts(name: str, content: bytes, *, size: int | None = None, sha256: bytes | None = None) -> list[Part]:
    """Send a file in two pieces."""
    middle = len(content) // 2
    common = {
        "name": name,
        "size_bytes": len(content) if size is None else size,
        "sha256": hashlib.sha256(content).digest() if sha256 is None else sha256,
    }
    return [Part(**common, chunk=content[:middle]), Part(**common, chunk=content[middle:])]


async def fetch(sender: Sender) -> dict[str, bytes]:
    return await fetch_model_files(cast(Executor, sender), Rank(0), NAMES, timeout_s=7.0)


async def test_files_come_whole_also_where_one_is_empty_or_missing() -> None:
    sent = [*parts("config.json", b"{}"), *parts("tokenizer.json", b"")]
    assert await fetch(Sender(*sent)) == {"config.json": b"{}", "tokenizer.json": b""}
    assert await fetch(Sender()) == {}


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (parts("config.json", b"{}", sha256=b"\0" * 32), "config.json has another SHA-256"),
        (parts("config.json", b"{}", sha256=b""), "config.json has another SHA-256"),
        (parts("config.json", b"{}", size=3), "config.json ended after 2 of 3 bytes"),
        (parts("config.json", b"1234", size=3), "config.json is larger than the 3 bytes it should have"),
        (parts("config.json", b"{}", size=MAX_FILE_BYTES + 1), f"config.json has {MAX_FILE_BYTES + 1} bytes: at most"),
        (parts("model.safetensors", b"{}"), "it sent 'model.safetensors', which nobody asked for"),
        (parts("../config.json", b"{}"), "which nobody asked for"),
    ],
)
async def test_what_no_rank_of_ours_sends_is_refused(sent: list[Part], cause: str) -> None:
    with pytest.raises(RankCallError, match=cause) as caught:
        await fetch(Sender(*sent))
    assert (caught.value.rank, caught.value.method) == (0, "GetModelFiles")


async def test_all_files_together_are_bounded_before_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_files, "MAX_BYTES", 5)
    with pytest.raises(RankCallError, match=r"tokenizer.json has 3 bytes: at most \d+, and 5 in all, are taken"):
        await fetch(Sender(*parts("config.json", b"123"), *parts("tokenizer.json", b"456")))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionError("refused"), "refused"),
        (TimeoutError(), "no answer within 7 s"),
        (PermissionDenied("not yours"), "not yours"),
    ],
)
async def test_transport_that_fails_names_rank_and_call(error: Exception, cause: str) -> None:
    with pytest.raises(RankCallError, match=cause):
        await fetch(Sender(*parts("config.json", b"{}"), error=error))


def model_files() -> dict[str, bytes]:
    return {
        "config.json": b'{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}',
        "tokenizer.json": Tokenizer.for_scripted().to_json().encode(),
        "chat_template.jinja": b"{{ messages[0].content }}",
    }


def sender_of(files: dict[str, bytes]) -> Sender:
    return Sender(*(part for name, content in files.items() for part in parts(name, content)))


async def test_text_is_learned_once_from_whichever_group_has_it_first() -> None:
    learned: list[ModelText] = []
    text = TextOnWorkers("/models/m", learned.append)
    with pytest.raises(GroupNotFormed, match="rank 0 has loaded no model from /models/m") as caught:
        await text.learn(cast(Executor, Sender()))
    assert caught.value.loss.rank == 0
    with pytest.raises(GroupNotFormed, match="rank 0 failed at GetModelFiles: gone"):
        await text.learn(cast(Executor, Sender(error=ConnectionError("gone"))))
    first, second = sender_of(model_files()), sender_of(model_files())
    await text.learn(cast(Executor, first))
    await text.learn(cast(Executor, second))
    assert (first.num_calls, second.num_calls) == (1, 0)
    (one,) = learned
    assert one.tokenizer.decode(one.tokenizer.encode("as sent")) == "as sent"
    assert one.chat_template is not None
    assert one.chat_template.source == "{{ messages[0].content }}"
    # What a gateway is sent is what the worker sent; there is no directory here that it could look into.
    assert dict(one.tokenizer_files()) == model_files()
    assert one.directory is None


def test_faults_of_sent_files_say_where_the_files_are() -> None:
    files = {**model_files(), "config.json": b"\xff", "chat_template.jinja": b"{% if %}"}
    del files["tokenizer.json"]
    with pytest.raises(ConfigurationError) as caught:
        text_of_files(SentFiles("/models/m", files))
    config, tokenizer = caught.value.faults
    assert config[1] == "/models/m/config.json on the workers"
    assert config[2].startswith("cannot be read as JSON: ")
    assert tokenizer[1] == "/models/m on the workers"
    assert tokenizer[2].startswith("has no tokenizer.json")
    assert set(files) <= set(TEXT_FILES)
