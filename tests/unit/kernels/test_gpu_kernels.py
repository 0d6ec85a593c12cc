"""Each Triton kernel against its plain-torch reference, through Triton's interpreter, at odd shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import support.triton_interpreter  # noqa: F401  # before the kernels
from maniple_kernels.gpu import gate, logprobs, mask, paged_decode, paged_prefill, penalties, rms_norm, rotary, sample
from maniple_kernels.gpu import store_kv as gpu_store_kv
from maniple_kernels.gpu.shapes import attention_shape
from maniple_kernels.gumbel import gumbel_noise
from maniple_kernels.kv_store import store_kv
from maniple_kernels.paged_attention import AttentionPlan, paged_attention_reference, plan_attention
from maniple_kernels.rms_norm import rms_norm_reference
from maniple_kernels.rotary import rotate_reference
from maniple_kernels.silu_mul import silu_mul_reference
from worker_service.sampling.sampler import kept_ids

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "fp16", "bf16"])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    torch.manual_seed(5)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # the interpreter computes masked lanes too
        yield
    torch.set_num_threads(num_threads)


def near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


class Step:
    """Requests of (tokens before, tokens of this step) over scattered blocks."""

    def __init__(self, requests: list[tuple[int, int]], heads: tuple[int, int], dim: int, block_size: int) -> None:
        self.seq_lens = np.array([before + count for before, count in requests], np.int32)
        needed = -(-self.seq_lens // block_size)
        ids = np.random.default_rng(2).permutation(np.arange(1, needed.sum() + 1)).astype(np.int32)
        self.tables = np.zeros((len(requests), needed.max()), np.int32)
        for index, (end, count) in enumerate(zip(needed.cumsum(), needed, strict=True)):
            self.tables[index, :count] = ids[end - count : end]
        self.starts = np.cumsum([0, *(count for _, count in requests)]).astype(np.int32)
        # Queries lie in wider rows, as they do in the fused projection.
        self.query = torch.randn(int(self.starts[-1]), heads[0] + 3, dim)[:, 1 : heads[0] + 1]
        num_blocks = int(needed.sum()) + 1
        # On a device the head dimension of keys lies innermost; the reference takes either.
        self.keys = torch.randn(num_blocks, heads[1], block_size, dim).transpose(2, 3)
        self.values = torch.randn(num_blocks, heads[1], block_size, dim)

    def to(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self.query.to(dtype), self.keys.to(dtype), self.values.to(dtype)

    @property
    def plan(self) -> AttentionPlan:
        return plan_attention(self.tables, self.starts, self.seq_lens, 1)


def soft_capped(query: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float, cap: float) -> Tensor:
    """Attention with a soft cap of one query a request, written out."""
    out = torch.empty(query.shape)
    group = query.shape[1] // keys.shape[1]
    for index, seq_len in enumerate(step.seq_lens.tolist()):
        positions = torch.arange(seq_len)
        blocks = torch.from_numpy(step.tables[index]).long()[positions // keys.shape[3]]
        for head in range(query.shape[1]):
            own_keys = keys[blocks, head // group, :, positions % keys.shape[3]]
            own_values = values[blocks, head // group, positions % keys.shape[3]]
            scores = own_keys @ query[index, head] * scale
            out[index, head] = (cap * torch.tanh(scores / cap)).softmax(-1) @ own_values
    return out


SHAPES = pytest.mark.parametrize(
    ("heads", "dim", "block_size"),
    [((6, 3), 64, 16), ((5, 1), 80, 32), ((1, 1), 128, 16), ((20, 1), 16, 16)],
    ids=["gqa", "mqa-odd-dim", "mha", "group-of-20"],
)


@DTYPES
@SHAPES
@pytest.mark.parametrize(("window", "num_splits"), [(0, 1), (0, 4), (1, 1), (21, 4)])
def test_decode_is_the_reference(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, block_size: int, window: int, num_splits: int
) -> None:
    step = Step([(0, 1), (1, 1), (15, 1), (16, 1), (300, 1)], heads, dim, block_size)
    query, keys, values = step.to(dtype)
    scratch = paged_decode.DecodeScratch(len(query), heads[0], dim, num_splits, "cpu")
    tables, lengths = torch.from_numpy(step.tables), torch.from_numpy(step.seq_lens)
    actual = paged_decode.paged_decode(query, keys, values, tables, lengths, 0.21, scratch=scratch, window=window)
    near(actual, paged_attention_reference(query.float(), keys.float(), values.float(), step.plan, 0.21, window))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_caps_scores(num_splits: int) -> None:
    step = Step([(0, 1), (70, 1), (129, 1)], (4, 2), 64, 16)
    scratch = paged_decode.DecodeScratch(3, 4, 64, num_splits, "cpu")
    tables, lengths = torch.from_numpy(step.tables), torch.from_numpy(step.seq_lens)
    query, keys, values = step.to(torch.float32)
    actual = paged_decode.paged_decode(query, keys, values, tables, lengths, 1.0, scratch=scratch, soft_cap=5.0)
    near(actual, soft_capped(query, keys, values, step, 1.0, 5.0))
    tiles = torch.from_numpy(paged_prefill.plan_tiles(step.starts, paged_prefill.tile_queries(query, keys)))
    starts = torch.from_numpy(step.starts)
    actual = paged_prefill.paged_prefill(query, keys, values, tables, tiles, starts, lengths, 1.0, soft_cap=5.0)
    near(actual, soft_capped(query, keys, values, step, 1.0, 5.0))


def test_decode_pads_with_zeros_and_a_row_has_the_same_bits_in_any_company() -> None:
    step = Step([(700, 1), (3, 1)], (6, 3), 64, 16)
    query, keys, values = step.to(torch.float32)
    scratch = paged_decode.DecodeScratch(4, 6, 64, 8, "cpu")
    tables = torch.zeros(4, step.tables.shape[1], dtype=torch.int32)
    tables[2:] = torch.from_numpy(step.tables)
    lengths = torch.tensor([0, 0, *step.seq_lens], dtype=torch.int32)
    padded = torch.cat((torch.randn(2, 6, 64), query))
    crowd = paged_decode.paged_decode(padded, keys, values, tables, lengths, 0.2, scratch=scratch)
    alone = paged_decode.paged_decode(query[:1], keys, values, tables[2:3], lengths[2:3], 0.2, scratch=scratch)
    assert torch.equal(crowd[:2], torch.zeros(2, 6, 64))
    assert torch.equal(crowd[2], alone[0])


@pytest.mark.parametrize(
    ("num_reqs", "max_seq_len", "expected"),
    [(1, 100_000, 32), (1, 300, 1), (1, 1024, 4), (64, 100_000, 1), (4, 100_000, 8)],
)
def test_splits_fill_the_device_but_are_not_short(num_reqs: int, max_seq_len: int, expected: int) -> None:
    assert paged_decode.num_splits_for(num_reqs, 8, max_seq_len, 132) == expected


@DTYPES
@SHAPES
@pytest.mark.parametrize("window", [0, 1, 21])
@pytest.mark.parametrize(
    "requests",
    [[(0, 37), (0, 1), (0, 16)], [(33, 1), (0, 0), (5, 19), (70, 9), (40, 0)]],
    ids=["prefill", "mixed-with-rows-of-nothing"],
)
def test_prefill_is_the_reference(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    window: int,
    requests: list[tuple[int, int]],
) -> None:
    step = Step(requests, heads, dim, block_size)
    query, keys, values = step.to(dtype)
    actual = paged_prefill.paged_prefill(
        query,
        keys,
        values,
        torch.from_numpy(step.tables),
        torch.from_numpy(paged_prefill.plan_tiles(step.starts, paged_prefill.tile_queries(query, keys))),
        torch.from_numpy(step.starts),
        torch.from_numpy(step.seq_lens),
        0.21,
        window=window,
    )
    near(actual, paged_attention_reference(query.float(), keys.float(), values.float(), step.plan, 0.21, window))


def test_contexts_of_thousands_are_the_reference() -> None:
    step = Step([(4100, 1), (2, 1)], (2, 1), 16, 32)
    query, keys, values = step.to(torch.float32)
    scratch = paged_decode.DecodeScratch(2, 2, 16, 32, "cpu")
    tables, lengths = torch.from_numpy(step.tables), torch.from_numpy(step.seq_lens)
    expected = paged_attention_reference(query, keys, values, step.plan, 0.21, 0)
    near(paged_decode.paged_decode(query, keys, values, tables, lengths, 0.21, scratch=scratch), expected)
    tiles = torch.from_numpy(paged_prefill.plan_tiles(step.starts, paged_prefill.tile_queries(query, keys)))
    starts = torch.from_numpy(step.starts)
    near(paged_prefill.paged_prefill(query, keys, values, tables, tiles, starts, lengths, 0.21), expected)


def test_heads_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256"):
        attention_shape("paged_decode", 90, width=512, itemsize=2)


@DTYPES
def test_store_kv_is_the_reference(dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 6, 5, 80).to(dtype)[:, :, :3]
    slots = torch.tensor([17, 3, 33, 40, 79, 18])
    expected = torch.zeros(2, 5, 3, 16, 80, dtype=dtype)
    actual = expected.clone()
    store_kv(keys, values, slots, expected[0].transpose(2, 3), expected[1])
    gpu_store_kv.store_kv(keys, values, slots, actual[0].transpose(2, 3), actual[1])
    assert torch.equal(actual, expected)


@DTYPES
@pytest.mark.parametrize("size", [1, 576, 5000])
def test_rms_norm_is_the_reference(dtype: torch.dtype, size: int) -> None:
    x, weight, residual = torch.randn(3, size).to(dtype), torch.randn(size).to(dtype), torch.randn(3, size)
    near(rms_norm.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    added = residual.clone()
    actual = rms_norm.rms_norm(x, weight, 1e-5, added)
    assert torch.equal(added, residual + x.float())
    near(actual, rms_norm_reference(residual + x.float(), weight, 1e-5))


@DTYPES
@pytest.mark.parametrize("dim", [64, 80])
def test_norm_and_rotation_are_the_references(dtype: torch.dtype, dim: int) -> None:
    given, cos_sin, positions = torch.randn(7, 15, dim).to(dtype), torch.randn(50, dim), torch.randint(0, 50, (7,))
    query_norm, key_norm = torch.randn(2, dim).to(dtype)

    rotated = given.clone()
    rotary.norm_and_rotate_(rotated[:, :12], cos_sin, positions)
    near(rotated[:, :12], rotate_reference(given[:, :12], cos_sin, positions))
    assert torch.equal(rotated[:, 12:], given[:, 12:])

    both = given.clone()
    norms = {"query_norm": query_norm, "key_norm": key_norm, "eps": 1e-6}
    rotary.norm_and_rotate_(both[:, :12], cos_sin, positions, num_query_heads=9, **norms)
    wide = given.float()
    queries = rms_norm_reference(wide[:, :9], query_norm.float(), 1e-6)
    keys = rms_norm_reference(wide[:, 9:12], key_norm.float(), 1e-6)
    near(both[:, :12], rotate_reference(torch.cat((queries, keys), 1), cos_sin, positions))


@DTYPES
@pytest.mark.parametrize("size", [1, 1000, 1536])
def test_gates_are_the_references(dtype: torch.dtype, size: int) -> None:
    gate_up = torch.randn(3, 2 * size).to(dtype)
    near(gate.gate_mul(gate_up), silu_mul_reference(gate_up))
    first, second = gate_up.float().chunk(2, dim=-1)
    near(gate.gate_mul(gate_up, activation="gelu"), functional.gelu(first, approximate="tanh") * second)


def test_log_probabilities_are_the_reference() -> None:
    scores, token_ids = torch.randn(4, 1003) * 3, torch.tensor([0, 5, 1002, 77], dtype=torch.int32)
    scores[1, 100:900] = float("-inf")
    scores[3, 60:90] = scores[3, 77]  # of equals the lower ids come first
    actual, expected = (
        logprobs.gather_logprobs(scores, token_ids),
        logprobs.gather_logprobs_reference(scores, token_ids),
    )
    near(actual[0], expected[0])
    near(actual[2], expected[2])
    assert actual[1].tolist() == expected[1].tolist()
    assert actual[1][3] == 1 + int((scores[3] > scores[3, 77]).sum()) + 17


def test_mask_is_the_reference() -> None:
    scores, rows = torch.randn(4, 1003), torch.tensor([3, 1], dtype=torch.int32)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 32), dtype=torch.int64).to(torch.int32)
    expected = mask.apply_mask_reference(scores, rows, bits)
    mask.apply_mask_(scores, rows, bits)
    assert torch.equal(scores, expected)
    assert expected[3].isinf().any()
    assert not expected[0].isinf().any()


def test_penalties_are_the_reference() -> None:
    scores, seen = torch.randn(6, 1003), (torch.rand(5, 1003) < 0.3).to(torch.uint8)
    scores[3, :40], scores[3, 40:80], scores[3, 80:120] = 3e38, -3e38, float("-inf")
    counts = torch.randint(0, 3, (5, 1003), dtype=torch.int32)
    factors = [torch.tensor([1.0, 1.3, 1.0, 0.5]), torch.tensor([0.0, 0.0, 0.7, -1.0]), torch.tensor([0, 0.2, 0, 1.5])]
    rows, slots = (torch.tensor(places, dtype=torch.int32) for places in ([0, 4, 5, 3], [1, 4, 0, 2]))
    before = scores.clone()
    expected = penalties.penalize_reference(scores, rows, slots, seen, counts, *factors)
    assert torch.equal(expected[0], scores[0])  # everything off
    penalties.penalize_(scores, rows, slots, seen, counts, *factors)
    assert torch.equal(scores, expected)
    assert torch.equal(scores[1:3], before[1:3])  # rows that were not named
    assert not scores.isnan().any()
    assert (scores[3, :80][seen[2, :80].bool()].abs() < 1.8e38).all()


def draw(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, keys: tuple[int, int]) -> int:
    """What the worker's sampler on the host draws."""
    row = scores.numpy()
    if temperature < 1e-5:
        return int(row.argmax())
    row = (row / np.float32(temperature)).astype(np.float32)
    kept = kept_ids(row, top_k, top_p, min_p)
    return int(kept[np.argmax(row[kept] + gumbel_noise(*keys, kept))])


@pytest.mark.parametrize("vocab_size", [1003, 5000])
def test_sampling_is_that_of_the_host(vocab_size: int) -> None:
    num_rows = 16
    rng = np.random.default_rng(7)
    scores = torch.randn(num_rows, vocab_size) * 2
    scores[:, ::7] = scores[:, :1]  # ties
    scores[3] = float("-inf")
    scores[4, :500] = float("-inf")
    temperature = torch.rand(num_rows) * 2
    temperature[:2] = torch.tensor([0.0, 1e-6])
    top_k = torch.from_numpy(rng.integers(0, 60, num_rows).astype(np.int32))
    top_p, min_p = torch.rand(num_rows) * 0.9 + 0.1, torch.rand(num_rows) * 0.2
    top_k[::4], top_p[::3], min_p[::2] = 0, 1.0, 0.0
    keys = rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32)
    chosen = torch.empty(num_rows, dtype=torch.int32)
    sample.sample(scores, temperature, top_k, top_p, min_p, sample.keys_on(CPU, keys), chosen)
    expected = [
        draw(scores[row], *(float(temperature[row]), int(top_k[row]), float(top_p[row]), float(min_p[row])), key)
        for row, key in enumerate([(int(k0), int(k1)) for k0, k1 in keys])
    ]
    assert chosen.tolist() == expected


def test_noise_is_that_of_the_protocol() -> None:
    # Temperature 1 over equal scores: the id with the highest noise wins, so one row checks all of its noise.
    keys = np.random.default_rng(8).integers(0, 2**32, (64, 2), dtype=np.uint32)
    chosen = torch.empty(64, dtype=torch.int32)
    ones, zeros = torch.ones(64), torch.zeros(64)
    sample.sample(torch.zeros(64, 5000), ones, zeros.int(), ones, zeros, sample.keys_on(CPU, keys), chosen)
    expected = [int(np.argmax(gumbel_noise(int(k0), int(k1), np.arange(5000)))) for k0, k1 in keys]
    assert chosen.tolist() == expected
