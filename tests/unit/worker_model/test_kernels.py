"""Each operation against its plain-torch reference, at odd sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from maniple_kernels import backend
from maniple_kernels.argmax import finite_argmax, finite_argmax_reference
from maniple_kernels.backend import fits_cpu_kernels, has_cpu_kernels
from maniple_kernels.kv_store import store_kv
from maniple_kernels.paged_attention import paged_attention, paged_attention_reference, plan_attention
from maniple_kernels.rms_norm import rms_norm, rms_norm_heads_, rms_norm_reference
from maniple_kernels.rotary import rotate_, rotate_reference
from maniple_kernels.silu_mul import silu_mul, silu_mul_reference
from support.attention_plans import REQUESTS, make_plan

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def _setting() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    if not has_cpu_kernels():
        pytest.skip("numba or an OpenMP library is missing: the references are all there is")


def near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS.keys())
@pytest.mark.parametrize("window", [0, 1, 21])
@pytest.mark.parametrize(("heads", "dim", "block_size"), [((6, 3), 32, 16), ((5, 1), 16, 32), ((2, 2), 80, 16)])
def test_paged_attention_is_the_reference(
    dtype: torch.dtype,
    requests: list[tuple[int, int]],
    window: int,
    heads: tuple[int, int],
    dim: int,
    block_size: int,
) -> None:
    plan, num_blocks = make_plan(requests, block_size, num_threads=2)
    num_tokens = int(plan.query_start_loc[-1])
    # Queries lie in wider rows, as they do in the fused projection.
    query = torch.randn(num_tokens, heads[0] + 3, dim).to(dtype)[:, 1 : heads[0] + 1]
    keys = torch.randn(num_blocks, heads[1], dim, block_size).to(dtype)
    values = torch.randn(num_blocks, heads[1], block_size, dim).to(dtype)
    assert fits_cpu_kernels(query, dim, block_size)
    actual = paged_attention(query, keys, values, plan, 0.21, window)
    expected = paged_attention_reference(query.float(), keys.float(), values.float(), plan, 0.21, window)
    near(actual, expected.to(dtype))


@DTYPES
@pytest.mark.parametrize("window", [0, 19])
def test_paged_attention_of_a_query_has_the_same_bits_in_any_step(dtype: torch.dtype, window: int) -> None:
    heads, dim, block_size, length = 4, 32, 16, 277
    keys = torch.randn(19, 2, dim, block_size).to(dtype)
    values = torch.randn(19, 2, block_size, dim).to(dtype)
    query = torch.randn(length, heads, dim).to(dtype)
    table = np.random.default_rng(3).permutation(19)[None].astype(np.int32)
    # What lies behind the last token is nobody's, nor a number.
    keys[table[0, length // block_size], :, :, length % block_size :] = torch.nan
    values[table[0, length // block_size], :, length % block_size :] = torch.nan

    def attend(start: int, end: int) -> Tensor:
        starts, seq_lens = np.array([0, end - start], np.int32), np.array([end], np.int32)
        plan = plan_attention(table, starts, seq_lens, num_threads=2)
        return paged_attention(query[start:end].contiguous(), keys, values, plan, 0.2, window)

    whole = attend(0, length)
    chunked = torch.cat([attend(0, 7), attend(7, 30), attend(30, length)])
    alone = torch.cat([attend(position, position + 1) for position in range(length)])
    assert not whole.isnan().any()
    assert torch.equal(whole, chunked)
    assert torch.equal(whole, alone)


@pytest.mark.parametrize("requests", [REQUESTS["mixed"], [(7, 300), (0, 1), (33, 40)]], ids=["few", "many"])
def test_plan_covers_every_token_once_whatever_the_threads(requests: list[tuple[int, int]]) -> None:
    for num_threads in (1, 2, 5):
        plan, _ = make_plan(requests, 16, num_threads)
        covered = sorted(
            (int(request), int(first) + i, int(position) + i)
            for request, first, count, position in plan.tiles
            for i in range(count)
        )
        starts = plan.query_start_loc
        assert covered == [
            (index, int(starts[index]) + i, before + i)
            for index, (before, count) in enumerate(requests)
            for i in range(count)
        ]


@DTYPES
def test_rms_norm_is_the_reference(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 48).to(dtype), torch.randn(48).to(dtype)
    near(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@DTYPES
def test_rms_norm_adds_into_the_residual_stream(dtype: torch.dtype) -> None:
    x, weight, residual = torch.randn(7, 48).to(dtype), torch.randn(48).to(dtype), torch.randn(7, 48)
    total = x.float() + residual
    actual = rms_norm(x, weight, 1e-5, residual)
    near(residual, total)
    near(actual, rms_norm_reference(total, weight, 1e-5))


@DTYPES
def test_rms_norm_of_heads_leaves_the_rest_of_the_row(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(5, 6, 32).to(dtype), torch.randn(32).to(dtype)
    expected = rows.clone()
    expected[:, 1:4] = rms_norm_reference(rows[:, 1:4], weight, 1e-6)
    rms_norm_heads_(rows[:, 1:4], weight, 1e-6)
    near(rows, expected)


@DTYPES
def test_rotary_is_the_reference(dtype: torch.dtype) -> None:
    rows, positions = torch.randn(9, 5, 32).to(dtype), torch.randint(0, 50, (9,))
    cos_sin = torch.randn(50, 32)
    expected = rows.clone()
    expected[:, :3] = rotate_reference(rows[:, :3], cos_sin, positions)
    rotate_(rows[:, :3], cos_sin, positions)
    near(rows, expected)


@DTYPES
def test_silu_mul_is_the_reference(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 96) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    near(silu_mul(gate_up), silu_mul_reference(gate_up))


def test_store_kv_writes_each_token_to_its_slot_and_nothing_else() -> None:
    keys, values = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    key_cache, value_cache = torch.zeros(4, 2, 8, 16), torch.zeros(4, 2, 16, 8)
    slots = torch.tensor([17, 63, 32])
    store_kv(keys, values, slots, key_cache, value_cache)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(key_cache[slot // 16, :, :, slot % 16], keys[token])
        assert torch.equal(value_cache[slot // 16, :, slot % 16], values[token])
    assert int((key_cache != 0).sum()) == keys.numel()
    assert int((value_cache != 0).sum()) == values.numel()


def test_bfloat16_is_rounded_to_nearest_even_on_store() -> None:
    from maniple_kernels.cpu.rms_norm import normalize_rows
    from maniple_kernels.cpu.simd import flat

    # eps of -1 + 1 / mean makes the factor 1 for rows of ones; here the weight carries the values to be rounded.
    weight = torch.randn(64) * torch.logspace(-20, 20, 64)
    weight[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 0.0])  # ties go to even
    out = torch.empty(64, dtype=torch.bfloat16)
    normalize_rows(flat(torch.ones(64)), 1, 64, flat(weight), np.float32(0), flat(out))
    assert torch.equal(out, weight.to(torch.bfloat16))


def test_finite_argmax_is_the_first_highest_and_says_what_is_no_number() -> None:
    scores = torch.randn(9, 2112)
    scores[0, [2111, 77, 1500]] = 9.0  # the first of equals, of three tiles
    scores[1, :] = -3.0
    scores[2, 2111] = 8.0
    for row, value in ((3, math.nan), (4, math.inf), (5, -math.inf)):
        scores[row, 1031] = value
    scores[6, :] = torch.finfo(torch.float32).min
    expected = [77, 0, 2111, -1, -1, -1, 0, *scores[7:].argmax(dim=-1).tolist()]
    assert finite_argmax(scores).tolist() == expected
    assert finite_argmax_reference(scores).tolist() == expected
    assert finite_argmax(scores[:, :211].contiguous()).tolist()[7:] == scores[7:, :211].argmax(dim=-1).tolist()


def test_operation_without_a_kernel_that_fits_is_computed_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, dict[str, object]]] = []

    class Log:
        def info(self, event: str, **facts: object) -> None:
            said.append((event, facts))

    monkeypatch.setattr("maniple_kernels.backend.structlog.get_logger", lambda _: Log())
    backend._note_reference.cache_clear()
    x, weight = torch.randn(3, 40), torch.randn(40)  # no multiple of what a kernel walks at a time
    for _ in range(3):
        near(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
        near(silu_mul(x), silu_mul_reference(x))
    facts = {"device": "cpu", "dtype": "float32"}
    assert said == [("kernel.fell_back", {"operation": name} | facts) for name in ("rms_norm", "silu_mul")]
    backend._note_reference.cache_clear()
