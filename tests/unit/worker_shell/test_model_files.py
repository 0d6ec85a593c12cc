"""What of a model's directory is sent, and which names are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from service_chassis.errors import InvalidParameter
from worker_service.model_files import read_model_files


async def sent(source: Path, *names: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    async for part in read_model_files(str(source), names):
        files[part.name] = files.get(part.name, b"") + part.chunk
    return files


async def test_files_that_exist_are_sent_and_others_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "empty").write_bytes(b"")
    assert await sent(tmp_path, "config.json", "no.json", "empty", "é" * 127) == {"config.json": b"{}", "empty": b""}


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a/", "a\0b", "x" * 256, "é" * 128])
async def test_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^names="):
        await sent(tmp_path, name)
