"""Compile every kernel ahead of time, without a device, and read what the code needs.

``python -m maniple_kernels.gpu.aot`` prints a table.

A variant is one kernel for one architecture, one type of elements and one shape of heads. Registers, stack and spills
come from the code object itself, as NVIDIA's tools tell them; shared memory from the compiler.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from maniple_kernels.gpu import gate, logprobs, mask, paged_decode, paged_prefill, penalties, rms_norm, rotary, sample
from maniple_kernels.gpu import store_kv as kv_store
from maniple_kernels.gpu.launch import compiled_width
from maniple_kernels.gpu.shapes import ARCHITECTURES, Shape, attention_shape, shape_of

# What a program may take of one multiprocessor: bytes of shared memory (CUDA C++ Programming Guide, table of technical
# specifications, "maximum amount of shared memory per thread block").
MOST_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
MOST_REGISTERS = 1 << 16  # of a multiprocessor, from the same table; one program at least must fit
_TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel to compile."""

    name: str
    architecture: int
    detail: str  # for people
    function: Any  # a triton.jit function
    types: Mapping[str, str]  # of its arguments, in their order; constants left out
    constants: Mapping[str, int | bool]
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a variant needs."""

    registers: int  # of one thread
    stack: int  # bytes of one thread
    spilled: int  # bytes of one thread, loaded or stored
    shared: int  # bytes of one program
    duration_s: float

    def excess(self, variant: Variant) -> str:
        """Say what it needs more than there is, or than it should; or nothing."""
        if self.stack or self.spilled:
            return f"{self.stack} bytes of stack and {self.spilled} spilled, by a thread"
        if self.shared > (most := MOST_SHARED[variant.architecture]):
            return f"{self.shared} of {most} bytes of shared memory"
        registers = self.registers * 32 * variant.shape.num_warps
        return f"{registers} of {MOST_REGISTERS} registers" if registers > MOST_REGISTERS else ""


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention."""

    head_dim: int
    group: int  # query heads of a KV head
    block_size: int = 16
    window: bool = False
    soft_cap: bool = False

    def __str__(self) -> str:
        extra = ("", " window")[self.window] + ("", " cap")[self.soft_cap]
        return f"d{self.head_dim} g{self.group} b{self.block_size}{extra}"


COMMON = (Heads(64, 3), Heads(128, 4), Heads(256, 2, window=True, soft_cap=True))
MORE = tuple(
    Heads(head_dim, group, block_size, feature, feature)
    for head_dim in (64, 80, 128, 256)
    for group in (1, 4, 8)
    for block_size in (16, 32)
    for feature in (False, True)
)


_WHOLE = 90  # the architecture of which the selection has more


def variants(*, everything: bool) -> Iterator[Variant]:
    """Yield what to compile: all; or every kernel for every architecture, and every type and kind of heads for one."""
    for architecture in ARCHITECTURES:
        is_whole = architecture == _WHOLE
        for heads in (*COMMON, *MORE) if everything else COMMON if is_whole else COMMON[:1]:
            types = _TYPES if everything or (is_whole and heads is COMMON[0]) else {"bf16": 2}
            for kind in types:
                yield from _attention(architecture, heads, kind)
        for kind in _TYPES if everything else ("bf16",):
            yield from _elementwise(architecture, kind)
        yield from _sampling(architecture)


def _variant(
    name: str,
    architecture: int,
    detail: str,
    function: Any,
    types: str,
    constants: Mapping[str, int | bool],
    shape: Shape,
) -> Variant:
    arguments = [argument for argument in function.arg_names if argument not in constants]
    given = types.split()
    assert len(given) == len(arguments), f"{name}: {len(given)} types for {arguments}"
    return Variant(
        name=name,
        architecture=architecture,
        detail=detail,
        function=function,
        types=dict(zip(arguments, given, strict=True)),
        constants=constants,
        shape=shape,
    )


def _attention(architecture: int, heads: Heads, kind: str) -> Iterator[Variant]:
    width = compiled_width(heads.head_dim)
    itemsize = _TYPES[kind]
    detail = f"{kind} {heads}"
    pointer = f"*{kind}"

    def constants(shape: Shape) -> dict[str, int | bool]:
        return {
            "GROUP": heads.group,
            "ROWS": max(shape.rows, triton.next_power_of_2(heads.group)),
            "HEAD_DIM": heads.head_dim,
            "WIDTH": width,
            "BLOCK_SIZE": heads.block_size,
            "KEYS": shape.columns,
            "HAS_WINDOW": heads.window,
            "HAS_SOFT_CAP": heads.soft_cap,
        }

    shape = attention_shape("paged_decode", architecture, width=width, itemsize=itemsize)
    types = f"{pointer} {pointer} {pointer} *i32 *i32 *fp32 *fp32 fp32 fp32 i32" + " i32" * 10
    yield _variant("paged_decode", architecture, detail, paged_decode.decode_part, types, constants(shape), shape)
    shape = attention_shape("paged_prefill", architecture, width=width, itemsize=itemsize)
    types = f"{pointer} {pointer} {pointer} *i32 *i32 *i32 *i32 {pointer} fp32 fp32 i32" + " i32" * 9
    yield _variant("paged_prefill", architecture, detail, paged_prefill.prefill_tile, types, constants(shape), shape)
    shape = shape_of("merge_splits", architecture)
    merged = {"HEAD_DIM": heads.head_dim, "WIDTH": width, "SPLITS": 16}
    types = f"*fp32 *fp32 {pointer} i32 i32 i32"
    yield _variant("merge_splits", architecture, detail, paged_decode.merge_splits, types, merged, shape)


def _elementwise(architecture: int, kind: str) -> Iterator[Variant]:
    pointer = f"*{kind}"
    shape = shape_of("store_kv", architecture)
    yield _variant(
        "store_kv",
        architecture,
        kind,
        kv_store.store_token,
        f"{pointer} {pointer} *i64 {pointer} {pointer}" + " i32" * 9,
        {"HEAD_DIM": 128, "BLOCK_SIZE": 16, "COLUMNS": shape.columns},
        shape,
    )
    for has_residual in (False, True):
        shape = shape_of("rms_norm", architecture)
        yield _variant(
            "rms_norm",
            architecture,
            f"{kind}{' residual' if has_residual else ''}",
            rms_norm.normalize_row,
            f"{pointer} *fp32 {pointer} {pointer} i32 fp32",
            {"HAS_RESIDUAL": has_residual, "COLUMNS": shape.columns},
            shape,
        )
    for has_norm in (False, True):
        shape = shape_of("norm_and_rotate", architecture)
        yield _variant(
            "norm_and_rotate",
            architecture,
            f"{kind}{' norm' if has_norm else ''}",
            rotary.norm_and_rotate_heads,
            f"{pointer} *fp32 *i64 {pointer} {pointer} i32 i32 i32 fp32",
            {"HALF": 64, "WIDTH": 64, "HEADS": shape.rows, "HAS_NORM": has_norm},
            shape,
        )
    for is_gelu in (False, True):
        shape = shape_of("gate", architecture)
        yield _variant(
            "gate",
            architecture,
            f"{kind} {'gelu' if is_gelu else 'silu'}",
            gate.gate_tile,
            f"{pointer} {pointer} i32",
            {"IS_GELU": is_gelu, "COLUMNS": shape.columns},
            shape,
        )


def _sampling(architecture: int) -> Iterator[Variant]:
    for name, function, types in (
        ("sample", sample.sample_row, "*fp32 *fp32 *i32 *fp32 *fp32 *i32 *i32 i32 i32"),
        ("penalize", penalties.penalize_tile, "*fp32 *i32 *i32 *u8 *i32 *fp32 *fp32 *fp32 i32 i32"),
        ("mask", mask.mask_tile, "*fp32 *i32 *i32 i32 i32 i32"),
        ("logprobs", logprobs.gather_row, "*fp32 *i32 *fp32 *i32 *fp32 i32 i32"),
    ):
        shape = shape_of(name, architecture)
        yield _variant(name, architecture, "fp32", function, types, {"COLUMNS": shape.columns}, shape)


def compile_variant(variant: Variant) -> Compiled:
    """Compile for the variant's architecture and read what the code needs."""
    signature = {argument: variant.types.get(argument, "constexpr") for argument in variant.function.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(variant.function.arg_names)
        if signature[argument].startswith("*") or argument.endswith("_stride")
    }
    started = time.monotonic()
    compiled = triton.compile(
        ASTSource(variant.function, signature=signature, constexprs=dict(variant.constants), attrs=aligned),
        target=GPUTarget("cuda", variant.architecture, 32),
        options={"num_warps": variant.shape.num_warps, "num_stages": variant.shape.num_stages},
    )
    duration_s = time.monotonic() - started
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        registers=usage["REG"],
        stack=usage["STACK"],
        spilled=usage["LOCAL"],
        shared=compiled.metadata.shared,
        duration_s=duration_s,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True, timeout=60
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", told)}


def main() -> int:
    """Print the table; exit with 1 if something spills or does not fit."""
    parser = argparse.ArgumentParser(description="Compile every Triton kernel without a device and say what it needs.")
    parser.add_argument("--all", action="store_true", help="every configuration (minutes), not a selection")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    options = parser.parse_args()
    print(
        f"{'kernel':<16} {'sm':>4} {'variant':<28} {'warps':>5} {'regs':>5} {'stack':>6} {'local':>6} {'shared':>7}  s"
    )
    refused = 0
    for variant in variants(everything=options.all):
        if options.kernel not in variant.name:
            continue
        needs = compile_variant(variant)
        excess = needs.excess(variant)
        refused += bool(excess)
        print(
            f"{variant.name:<16} {variant.architecture:>4} {variant.detail:<28} {variant.shape.num_warps:>5} "
            f"{needs.registers:>5} {needs.stack:>6} {needs.spilled:>6} {needs.shared:>7}  {needs.duration_s:.1f}"
            f"{f'  TOO MUCH: {excess}' if excess else ''}",
            flush=True,
        )
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
