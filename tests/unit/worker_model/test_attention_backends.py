"""The ways to compute attention: which there are, what they refuse, and that they agree."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import support.triton_interpreter  # noqa: F401  # before the kernels
from maniple_kernels.backend import gpu_kernels_interpreted
from maniple_kernels.paged_attention import paged_attention_reference, plan_attention
from service_chassis import kernel_rules
from service_chassis.errors import InvalidParameter
from service_chassis.kernel_rules import ATTENTION_ENTRY_POINTS, attention_backend_rule
from worker_service.attention import registry
from worker_service.attention.base import AttentionBackend, AttentionSpec, KvLayout, Tunable
from worker_service.attention.flashinfer import FlashInferAttention, FlashInferPlans, FlashInferStep
from worker_service.attention.registry import choose_attention_backend, register_attention_backend
from worker_service.forward.assemble import ForwardOptions, assemble_forward
from worker_service.forward.step_arrays import DeviceStepArrays
from worker_service.input_batch import StepInput
from worker_service.kv_cache import KvCache, KvCacheSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec(
    device=CPU,
    dtype=torch.float32,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_model_len=96,
)
MIXED = [(0, 3), (17, 1), (5, 7)]  # tokens before, tokens of the step
DECODES = [(3, 1), (40, 1), (16, 1)]


def make_step(requests: list[tuple[int, int]], block_size: int = 16) -> StepInput:
    """Lay out requests over scattered blocks."""
    counts = np.array([count for _, count in requests], np.int32)
    seq_lens = np.array([before + count for before, count in requests], np.int32)
    needed = -(-seq_lens // block_size)
    ids = np.random.default_rng(2).permutation(np.arange(1, needed.sum() + 1)).astype(np.int32)
    tables = np.zeros((len(requests), needed.max()), np.int32)
    for row, (end, count) in enumerate(zip(needed.cumsum(), needed, strict=True)):
        tables[row, :count] = ids[end - count : end]
    num_tokens = int(counts.sum())
    return StepInput(
        input_ids=np.zeros(num_tokens, np.int32),
        positions=np.concatenate([np.arange(before, before + count) for before, count in requests]),
        slot_mapping=np.zeros(num_tokens, np.int64),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=tables,
    )


def filled_cache(layout: KvLayout, num_blocks: int) -> KvCache:
    spec = KvCacheSpec(num_layers=1, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, layout=layout)
    cache = KvCache(spec, num_blocks, CPU)
    generator = torch.Generator().manual_seed(3)
    for part in cache.layers[0]:
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


def attend(
    backend: AttentionBackend, requests: list[tuple[int, int]], padding: int, **kind: Any
) -> tuple[Tensor, Tensor]:
    """Return what the backend computes for a step, and what the reference does."""
    step = make_step(requests)
    arrays = DeviceStepArrays(max_num_batched_tokens=24, max_num_seqs=4, max_num_blocks=6, device=CPU)
    tensors = arrays.place(step, len(requests) + padding if padding else None)
    kv = filled_cache(backend.layout, int(step.block_tables.max()) + 1).layers[0]
    # Queries lie in wider rows, as they do in the fused projection.
    query = torch.randn((len(tensors.input_ids), 10, 16), generator=torch.Generator().manual_seed(4))[:, :6]
    out = torch.full((len(query), 6, 16), 7.0)
    attended = backend.begin(step, tensors).attend(query, kv, 0.3, **kind, out=out)
    assert attended is out
    plan = plan_attention(step.block_tables, step.query_start_loc, step.seq_lens, 1)
    count = len(step.input_ids)
    kind = {"window": 0, "soft_cap": 0.0} | kind
    return attended[:count], paged_attention_reference(query[:count], *kv, plan, 0.3, **kind)


@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"soft_cap": 0.9}], ids=["plain", "window", "cap"])
@pytest.mark.parametrize("name", ["cpu", "torch", "triton"])
def test_backends_agree(name: str, kind: dict[str, Any], requests: list[tuple[int, int]]) -> None:
    with gpu_kernels_interpreted() if name == "triton" else np.errstate(), np.errstate(all="ignore"):
        attended, expected = attend(choose_attention_backend(name, SPEC), requests, 0, **kind)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_the_same_bits_with_padding_behind_them() -> None:
    with gpu_kernels_interpreted(), np.errstate(all="ignore"):
        backend = choose_attention_backend("triton", SPEC)
        padded, _ = attend(backend, DECODES, 1)
        alone, _ = attend(backend, DECODES, 0)
    assert torch.equal(padded, alone)


def test_padding_sees_nothing() -> None:
    with gpu_kernels_interpreted(), np.errstate(all="ignore"):
        backend = choose_attention_backend("triton", SPEC)
        step = make_step(DECODES)
        arrays = DeviceStepArrays(max_num_batched_tokens=24, max_num_seqs=4, max_num_blocks=6, device=CPU)
        tensors = arrays.place(step, 4)
        kv = filled_cache(backend.layout, int(step.block_tables.max()) + 1).layers[0]
        attended = backend.begin(step, tensors).attend(torch.randn(4, 6, 16), kv, 0.3)
    assert attended[3].abs().max() == 0
    assert tensors.slots[3] == 0  # in the null block
    assert tensors.seq_lens.tolist() == [4, 41, 17, 0]
    assert tensors.query_start_loc.tolist() == [0, 1, 2, 3, 4]


def test_soft_cap_of_the_reference_is_that_of_its_definition() -> None:
    step = make_step([(2, 1)])
    kv = filled_cache(KvLayout.SLOTS_INNERMOST, 2).layers[0]
    query = torch.randn(1, 6, 16)
    plan = plan_attention(step.block_tables, step.query_start_loc, step.seq_lens, 1)
    actual = paged_attention_reference(query, *kv, plan, 0.3, 0, 0.7)
    keys, values = kv[0][1, :, :, :3].double(), kv[1][1, :, :3].double()
    for head in range(6):
        scores = 0.7 * torch.tanh(0.3 * (query[0, head].double() @ keys[head // 3]) / 0.7)
        weights = torch.exp(scores) / torch.exp(scores).sum()
        torch.testing.assert_close(actual[0, head].double(), weights @ values[head // 3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("flashinfer", {}, "needs a CUDA device; this rank's is cpu"),
        ("triton", {}, "needs a CUDA device; this rank's is cpu"),
        ("cpu", {"device": torch.device("cuda", 1)}, "needs the CPU; this rank's device is cuda:1"),
        ("flashinfer", {"device": torch.device("cuda", 0)}, "needs FlashInfer: install maniple[flashinfer]"),
        ("xformers", {}, "must be auto or one of cpu, flashinfer, torch, triton"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused_with_the_reason(name: str, change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        choose_attention_backend(name, replace(SPEC, **change))
    assert "attention_backend" in str(refused.value)
    assert told in str(refused.value)


def test_too_wide_heads_are_refused() -> None:
    with gpu_kernels_interpreted(), pytest.raises(InvalidParameter, match="at most 256 elements"):
        choose_attention_backend("triton", replace(SPEC, head_dim=264))


def test_auto_is_the_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention_backend("auto", SPEC).name == "cpu"
    monkeypatch.setattr(registry, "has_gpu_kernels", lambda: False)
    with pytest.raises(InvalidParameter, match="needs Triton: install maniple"):
        choose_attention_backend("auto", replace(SPEC, device=torch.device("cuda", 0)))


def test_others_may_add_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    added: set[str] = set()
    for module in (registry, kernel_rules):
        monkeypatch.setattr(module, "added_attention_backends", added)
    from worker_service.attention.reference import ReferenceAttention

    assert "must be auto or one of" in attention_backend_rule("own")
    register_attention_backend("own", ReferenceAttention)
    assert attention_backend_rule("own", "cpu") == ""
    assert isinstance(choose_attention_backend("own", SPEC), ReferenceAttention)
    for taken in ("own", "triton", "auto"):
        with pytest.raises(ValueError, match="there is an attention backend of this name"):
            register_attention_backend(taken, ReferenceAttention)


def test_packages_may_bring_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "worker_service.attention.reference:ReferenceAttention", ATTENTION_ENTRY_POINTS)
    known = {(ATTENTION_ENTRY_POINTS, "theirs"): [point]}
    monkeypatch.setattr(registry, "entry_points", lambda group, name: known.get((group, name), []))
    assert choose_attention_backend("theirs", SPEC).name == "torch"
    monkeypatch.setattr(kernel_rules, "entry_points", lambda group, name: known.get((group, name), []))
    assert attention_backend_rule("theirs", "cpu") == ""


class _PagedWrapper:
    """FlashInfer's wrapper by its documentation: checks what it is given, and attends with plain loops."""

    made: list[_PagedWrapper] = []  # noqa: RUF012

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "HND"
        self.num_plans = 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype is torch.int32
            assert array.is_contiguous()
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert (num_qo_heads, num_kv_heads, head_dim_qk, page_size) == (6, 2, 16, 16)
        assert causal
        assert q_data_type is kv_data_type
        self.num_plans += 1
        self._starts, self._indptr = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._pages, self._last = paged_kv_indices.tolist(), paged_kv_last_page_len.tolist()
        assert sm_scale is not None
        self._scale, self._left, self._cap = sm_scale, window_left, logits_soft_cap

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor | None = None) -> Tensor:
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == (2, 16, 16)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        result = torch.empty(q.shape) if out is None else out
        for request, last in enumerate(self._last):
            pages = self._pages[self._indptr[request] : self._indptr[request + 1]]
            length = (len(pages) - 1) * 16 + last
            mine = [torch.cat([part[page] for page in pages], dim=1)[:, :length] for part in (keys, values)]
            start, end = self._starts[request : request + 2]
            for token in range(start, end):
                position = length - end + token
                first = 0 if self._left < 0 else max(0, position - self._left)
                for head in range(6):
                    scores = mine[0][head // 3, first : position + 1] @ q[token, head] * self._scale
                    if self._cap is not None:
                        scores = self._cap * torch.tanh(scores / self._cap)
                    result[token, head] = scores.softmax(0) @ mine[1][head // 3, first : position + 1]
        return result


@pytest.fixture
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = _PagedWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    _PagedWrapper.made.clear()


class _OnCpu:
    """FlashInfer's backend past its check of the device."""

    name, layout = FlashInferAttention.name, FlashInferAttention.layout

    def __init__(self) -> None:
        self.plans = FlashInferPlans(SPEC)

    def begin(self, step: StepInput, tensors: object) -> FlashInferStep:
        return FlashInferStep(self.plans, step)


@pytest.mark.usefixtures("_flashinfer")
@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"soft_cap": 0.9}], ids=["plain", "window", "cap"])
def test_flashinfer_is_called_as_documented(kind: dict[str, Any], requests: list[tuple[int, int]]) -> None:
    attended, expected = attend(_OnCpu(), requests, 0, **kind)  # type: ignore[arg-type]
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_flashinfer")
def test_flashinfer_plans_once_a_step_for_each_kind_of_layer() -> None:
    backend = _OnCpu()
    step = make_step(DECODES)
    kv = filled_cache(backend.layout, int(step.block_tables.max()) + 1).layers[0]
    query = torch.randn(3, 6, 16)
    for _ in range(2):
        attention = backend.begin(step, None)
        for window in (0, 5, 0, 5):
            attention.attend(query, kv, 0.3, window)
    assert [wrapper.num_plans for wrapper in _PagedWrapper.made] == [2, 2]


def test_only_what_has_kernels_of_ours_is_tuned() -> None:
    with gpu_kernels_interpreted():
        assert isinstance(choose_attention_backend("triton", SPEC), Tunable)
    for name in ("cpu", "torch"):
        options = ForwardOptions(attention_backend=name, tune_kernels=True)
        with pytest.raises(InvalidParameter, match=f"needs the attention backend triton: {name} has no kernels"):
            assemble_forward(None, SPEC, options)  # type: ignore[arg-type]  # it does not come to the model
