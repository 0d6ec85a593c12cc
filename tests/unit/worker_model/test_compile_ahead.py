"""What is compiled before a layer runs is what it calls, and is compiled by a process that outlives no load."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from maniple_kernels import compile_ahead
from maniple_kernels.argmax import finite_argmax
from maniple_kernels.backend import has_cpu_kernels
from maniple_kernels.compile_ahead import compiling_ahead, layer_parts, step_parts, types_of
from support.runner_driver import RunnerDriver
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

CONFIG = tiny_config("LlamaForCausalLM", hidden_size=96, intermediate_size=160, vocab_size=128)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if not has_cpu_kernels():
        pytest.skip("numba or an OpenMP library is missing: there is nothing to compile")
    from maniple_kernels.cpu.panel_products import has_products

    if not has_products(bfloat16=True):
        pytest.skip("this CPU has no instructions for panels: no layer is fused")


def infer_types(function: Any, arguments: tuple[Any, ...]) -> None:
    """Have numba find the types in a function, for which it needs those of everything that is called."""
    compiler: Any = importlib.import_module("numba.core.compiler")
    passes: Any = importlib.import_module("numba.core.typed_passes")
    target: Any = importlib.import_module("numba.core.registry").cpu_target
    passes.type_inference_stage(
        target.typing_context, target.target_context, compiler.run_frontend(function), arguments, None
    )


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_parts_are_compiled_for_the_types_that_a_layer_calls_them_with(name: str, tmp_path: Path) -> None:
    run_layer: Any = importlib.import_module("maniple_kernels.cpu.decoder_layer").run_layer

    write_checkpoint(tmp_path, CONFIG, tiny_tensors(CONFIG))
    driver = RunnerDriver(tmp_path, dtype=name)
    kv = driver.runner._kv
    assert kv is not None
    driver.runner._run_dummy(kv, [3])
    driver.runner._run_dummy(kv, [1])
    finite_argmax(torch.zeros(1, 32))
    own = types_of(layer_parts(name)[0][1])[1]
    called_as = next(
        types for types in run_layer.signatures if types[8][0] == own
    )  # one that was fused, over this cache
    infer_types(run_layer.py_func, called_as)  # of itself it came out of the cache, without what it calls
    known: dict[str, set[Any]] = {}
    for kind in ("float32", "bfloat16"):
        for function, arguments in (*layer_parts(kind), *step_parts(kind)):
            known.setdefault(function.__name__, set()).add(types_of(arguments))
    for function, arguments in (*layer_parts(name), *step_parts(name)):
        assert types_of(arguments) in function.signatures, function.__name__
        if function.__name__.startswith("_"):  # a layer alone calls it
            assert set(function.signatures) <= known[function.__name__], function.__name__


def test_the_other_process_marks_what_it_compiled_and_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = compile_ahead._mark("bfloat16")
    mark.unlink(missing_ok=True)
    with compiling_ahead(torch.bfloat16) as finish:
        finish()
    assert mark.exists()
    monkeypatch.setattr(subprocess, "Popen", None)
    for dtype in (torch.bfloat16, torch.float16, None):
        with compiling_ahead(dtype) as finish:
            finish()


def test_the_other_process_ends_with_a_load_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*words: Any, **how: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*words, **how))
        return started[-1]

    monkeypatch.setattr(compile_ahead, "_mark", lambda name: tmp_path / name)
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(RuntimeError, match="no weights"), compiling_ahead(torch.float32):
        raise RuntimeError("no weights")
    (process,) = started
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
