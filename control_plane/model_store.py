"""Find the files of a model by what the user calls it, fetching and converting them once where that is needed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from control_plane import model_sources
from control_plane.model_sources import Progress
from service_chassis.errors import ConfigurationError
from service_chassis.scripted import parse_scripted

# What the header of a GGUF file holds (fields and tensor names) fits; a digest of gigabytes would take minutes.
_HEADER_BYTES = 16 * 1024 * 1024
_LOCK_POLL_S = 0.1
_BLOCKS = "-blocks"  # behind the name of a directory whose weights stay quantized
_MAIN = "main"  # the hub's own default
_SOURCE = ".maniple-source"  # in a directory that was filled by ``place_model``: of what


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Where a model lies."""

    path: str  # a directory with config.json, tokenizer.json and safetensors, or the string of a scripted model
    source: str  # what the user called it
    name: str  # served under this name where no other is given
    is_here: bool = True  # False: only the workers have it, at ``path``


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model in the cache."""

    name: str
    path: Path
    num_bytes: int


def cache_directory() -> Path:
    """Return where models are kept: ``$MANIPLE_CACHE``, else ``~/.cache/maniple``."""
    return Path(os.environ.get("MANIPLE_CACHE") or Path.home() / ".cache" / "maniple").expanduser()


def resolve_model(
    spec: str,
    progress: Progress,
    *,
    cache: Path | None = None,
    workers_elsewhere: bool = False,
    keep_blocks: bool = False,
) -> ModelPlace:
    """Return where ``spec`` lies. Blocks, for minutes when something must be fetched.

    Args:
        spec: ``demo``, a directory, a ``.gguf`` file, a hub id, or ``scripted``.
        progress: called with (what, share in [0, 1], detail), from this or another thread. What it raises ends the
            work, with the processes that were started for it; the next call goes on where this one stopped.
        cache: default ``cache_directory()``.
        workers_elsewhere: they may have a directory that this machine has not.
        keep_blocks: of GGUF files, the demo model's too, weights in 8 and 4 bits stay so. In a directory of its own,
            beside that with bfloat16.
    Raises:
        ConfigurationError: there is no such model, or it cannot be had; a sentence says why.
        InvalidParameter: the string of a scripted model is wrong.
    """
    models = (cache or cache_directory()) / "models"
    if parse_scripted(spec) is not None:
        return ModelPlace(path=spec, source="scripted", name="scripted")
    if spec == "demo":
        with _storing(models, spec):
            return ModelPlace(path=str(_demo(models, progress, keep_blocks)), source=spec, name=spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        return ModelPlace(path=str(path.resolve()), source=spec, name=path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigurationError([("model", spec, "is a file, but not a .gguf file")])
        with _storing(models, spec):
            converted = _converted(path.resolve(), models, progress, keep_blocks)
        return ModelPlace(path=str(converted), source=spec, name=path.stem)
    if rule := missing_rule(spec, workers_elsewhere=workers_elsewhere):
        raise ConfigurationError([("model", spec, rule)])
    if looks_like_path(spec):
        return ModelPlace(path=os.path.normpath(spec), source=spec, name=path.name, is_here=False)
    return ModelPlace(path=str(model_sources.fetch_from_hub(spec, progress)), source=spec, name=spec)


def place_model(spec: str, target: Path, progress: Progress, *, revision: str = "", keep_blocks: bool = False) -> bool:
    """Fetch ``spec`` into the directory ``target``, converted where that is needed.

    The directory appears in one piece, so that nobody reads half a model; what is under way lies beside it, and another
    try goes on there. One that was fetched so from elsewhere, or as another revision, is replaced; whoever has its
    files open reads them on. One that somebody else put there is kept.

    Returns:
        False: ``target`` held a model already, which is kept.
    Raises:
        ConfigurationError: as ``resolve_model``; or ``spec`` is a directory, or a scripted model, which has no files;
            or ``target`` cannot appear in one piece.
    """
    source = {"model": spec, "revision": revision or _MAIN, "keep_blocks": keep_blocks}
    with _storing(target, spec):
        return _place(spec, target, progress, revision, source)


def _place(spec: str, target: Path, progress: Progress, revision: str, source: dict[str, object]) -> bool:
    if _is_kept(target, source):
        return False
    if os.path.ismount(target):
        rule = "is where a volume is mounted, and a model appears by renaming its directory: name one in it"
        raise ConfigurationError([("to", str(target), rule)])
    if not _is_complete(target) and target.exists() and any(target.iterdir()):
        raise ConfigurationError([("to", str(target), "is there already, and is no model")])
    if parse_scripted(spec) is not None or Path(spec).expanduser().is_dir():
        raise ConfigurationError([("model", spec, "is nothing to fetch")])
    is_on_hub = spec != "demo" and not looks_like_path(spec) and not Path(spec).is_file()
    if revision and not is_on_hub:
        raise ConfigurationError([("revision", revision, f"is for models of the hub, and {spec} is none")])
    work = target.parent / f".{target.name}.work"
    with _locked(target, progress):
        if _is_kept(target, source):
            return False
        work.mkdir(parents=True, exist_ok=True)
        if is_on_hub:
            whole = model_sources.fetch_from_hub(
                spec, progress, revision=revision, into=work / _snapshot_name(spec, revision)
            )
            shutil.rmtree(whole / ".cache", ignore_errors=True)  # the hub client's notes
        else:
            keep_blocks = bool(source["keep_blocks"])
            whole = Path(resolve_model(spec, progress, cache=work, keep_blocks=keep_blocks).path)
        (whole / _SOURCE).write_text(json.dumps(source), encoding="utf-8")
        old = target.parent / f".{target.name}.old-model"
        if target.exists():
            target.rename(old)
        whole.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(work)
    return True


def _is_kept(target: Path, source: dict[str, object]) -> bool:
    """Whether a model is there that is this one, or not ours to replace."""
    if not _is_complete(target):
        return False
    try:
        return bool(json.loads((target / _SOURCE).read_text(encoding="utf-8")) == source)
    except (FileNotFoundError, ValueError):
        return True  # somebody else's, or of a release that noted nothing


def _snapshot_name(spec: str, revision: str) -> str:
    # Files of one model or revision must not be left among those of another, whose fetching was given up.
    return hashlib.sha256(f"{spec} {revision}".encode()).hexdigest()[:16]


def looks_like_path(spec: str) -> bool:
    """Whether a model's name can only be meant as a path."""
    return spec.startswith(("/", "./", "../", "~")) or spec.endswith(".gguf")


def missing_rule(spec: str, *, workers_elsewhere: bool) -> str:
    """Return what is wrong with a name that is no path on this machine, or nothing.

    A path that only workers have must be one wherever they run, and hold what they load as it is.
    """
    if not looks_like_path(spec):
        return ""
    if not workers_elsewhere:
        return "does not exist"
    if spec.endswith(".gguf"):
        return "does not exist here, where .gguf files are converted"
    return "" if spec.startswith("/") else "does not exist here, and a directory on the workers must begin with /"


def list_models(*, cache: Path | None = None) -> list[StoredModel]:
    """Return the models in the cache, by name. Hub models are in the hub's own cache and not listed."""
    models = (cache or cache_directory()) / "models"
    if not models.is_dir():
        return []
    found = []
    for path in sorted(models.iterdir()):
        if _is_complete(path) and not path.name.startswith("."):
            num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            found.append(StoredModel(name=path.name, path=path, num_bytes=num_bytes))
    return found


def _demo(models: Path, progress: Progress, keep_blocks: bool) -> Path:
    target = models / ("demo" + _BLOCKS if keep_blocks else "demo")
    if not _is_complete(target):
        _fetch_demo(models, target, progress, keep_blocks)
    model_sources.add_demo_sampling(target)  # also to one that an earlier release cached
    return target


def _fetch_demo(models: Path, target: Path, progress: Progress, keep_blocks: bool) -> None:
    with _locked(target, progress):
        if not _is_complete(target):
            # Kept until the model is whole, so that a second try goes on where the first was killed.
            work = models / f".{target.name}.work"
            work.mkdir(parents=True, exist_ok=True)
            weights = model_sources.fetch_demo(work, progress)
            model_sources.convert(weights, target, progress, keep_blocks=keep_blocks)
            shutil.rmtree(work, ignore_errors=True)


def _converted(source: Path, models: Path, progress: Progress, keep_blocks: bool) -> Path:
    target = models / f"{source.stem}-{_fingerprint(source)}{_BLOCKS if keep_blocks else ''}"
    if _is_complete(target):
        return target
    with _locked(target, progress):
        if not _is_complete(target):
            model_sources.convert(source, target, progress, keep_blocks=keep_blocks)
    return target


def _is_complete(path: Path) -> bool:
    # The converter renames a whole directory into place; a partial one never has the final name.
    return (path / "config.json").is_file()


def _fingerprint(path: Path) -> str:
    """Return a key that changes when the file does."""
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEADER_BYTES))
    return digest.hexdigest()[:16]


@contextmanager
def _storing(place: Path, spec: str) -> Iterator[None]:
    """Say in a sentence what the file system refuses."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be kept in {place}: {error.strerror or error}"
        raise ConfigurationError([("model", spec, rule)]) from error


@contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time work on ``target``; the kernel frees the lock when its holder dies."""
    import fcntl

    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("wait", 0.0, "another process is fetching this model")
                time.sleep(_LOCK_POLL_S)
        for kind in ("new", "old"):  # of converters and others that were killed
            for leftover in target.parent.glob(f".{glob.escape(target.name)}.{kind}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield
