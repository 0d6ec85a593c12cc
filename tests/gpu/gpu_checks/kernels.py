"""Every kernel against its plain-torch reference: shapes of real models on a device, tiny ones by the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_checks.outcome import Report
from maniple_kernels.gpu import (
    gate,
    logprobs,
    mask,
    paged_decode,
    paged_prefill,
    penalties,
    rms_norm,
    rotary,
    sample,
    store_kv,
)
from maniple_kernels.gpu.launch import num_processors
from maniple_kernels.gumbel import gumbel_noise
from maniple_kernels.kv_store import store_kv_reference
from maniple_kernels.paged_attention import paged_attention_reference, plan_attention
from maniple_kernels.rms_norm import rms_norm_reference
from maniple_kernels.rotary import rotate_reference
from maniple_kernels.silu_mul import silu_mul_reference

_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large things are."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    heads: tuple[tuple[int, int, int], ...]  # query heads, KV heads, size
    decodes: tuple[int, ...]  # context lengths of single queries
    mixed: tuple[tuple[int, int], ...]  # tokens before, tokens now
    hidden: int
    vocab: int
    rows: int
    least_splits: int = 4  # of the keys of a request


def sizes_for(device: str) -> Sizes:
    """Return the sizes of a check on ``device``."""
    if device == "cpu":
        return Sizes(
            device=torch.device("cpu"),
            dtypes=(torch.float32,),
            heads=((4, 2, 16),),
            decodes=(19, 1, 0),
            mixed=((0, 9), (17, 1), (5, 7)),
            hidden=100,
            vocab=211,
            rows=2,
            least_splits=2,
        )
    return Sizes(
        device=torch.device("cuda", 0),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        heads=((32, 8, 128), (9, 3, 64), (16, 16, 80), (8, 4, 256)),
        decodes=(1, 17, 0, 1000, 4096, 20_000, 333),
        mixed=((0, 513), (700, 1), (2000, 130), (0, 1), (31, 33)),
        hidden=4096,
        vocab=128_256,
        rows=67,
    )


class Paged:
    """Random keys and values over scattered blocks, laid out as on a device."""

    def __init__(self, sizes: Sizes, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        block_size, (_, num_kv_heads, dim) = 16, heads
        self.seq_lens = np.array(lengths, np.int32)
        needed = -(-self.seq_lens // block_size)
        ids = np.random.default_rng(2).permutation(np.arange(1, needed.sum() + 1)).astype(np.int32)
        self.tables = np.zeros((len(lengths), max(1, int(needed.max()))), np.int32)
        for index, (end, count) in enumerate(zip(needed.cumsum(), needed, strict=True)):
            self.tables[index, :count] = ids[end - count : end]
        shape = (int(needed.sum()) + 1, num_kv_heads, block_size, dim)
        self.keys = torch.randn(shape, device=sizes.device, dtype=dtype).transpose(2, 3)
        self.values = torch.randn(shape, device=sizes.device, dtype=dtype)
        self._device = sizes.device

    def on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def reference(
        self, query: Tensor, starts: np.ndarray, window: int, cap: float, requests: np.ndarray | slice = slice(None)
    ) -> Tensor:
        plan = plan_attention(self.tables[requests], starts, self.seq_lens[requests], 1)
        return paged_attention_reference(query.float(), self.keys.float(), self.values.float(), plan, 0.11, window, cap)


def near(actual: Tensor, expected: Tensor) -> None:
    tolerance = _TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def check_decode(sizes: Sizes, dtype: torch.dtype) -> None:
    for heads in sizes.heads:
        paged = Paged(sizes, list(sizes.decodes), heads, dtype)
        count = len(sizes.decodes)
        query = torch.randn((count, heads[0], heads[2]), device=sizes.device, dtype=dtype)
        splits = paged_decode.num_splits_for(count, heads[1], max(sizes.decodes), num_processors(sizes.device))
        scratch = paged_decode.DecodeScratch(count, heads[0], heads[2], max(splits, sizes.least_splits), sizes.device)
        tables, lengths = paged.on_device(paged.tables), paged.on_device(paged.seq_lens)
        there = np.flatnonzero(paged.seq_lens)  # a row without keys is padding: zeros
        for window, cap in ((0, 0.0), (37, 11.0)):
            actual = paged_decode.paged_decode(
                query, paged.keys, paged.values, tables, lengths, 0.11, scratch=scratch, window=window, soft_cap=cap
            )
            expected = paged.reference(query[paged.on_device(there)], np.arange(len(there) + 1), window, cap, there)
            near(actual[paged.on_device(there)], expected)
            assert not actual[paged.on_device(np.flatnonzero(paged.seq_lens == 0))].any()


def check_prefill(sizes: Sizes, dtype: torch.dtype) -> None:
    starts = np.cumsum([0, *(now for _, now in sizes.mixed)]).astype(np.int32)
    for heads in sizes.heads:
        paged = Paged(sizes, [before + now for before, now in sizes.mixed], heads, dtype)
        query = torch.randn((int(starts[-1]), heads[0], heads[2]), device=sizes.device, dtype=dtype)
        tiles = paged_prefill.plan_tiles(starts, paged_prefill.tile_queries(query, paged.keys))
        for window, cap in ((0, 0.0), (37, 11.0)):
            actual = paged_prefill.paged_prefill(
                query,
                paged.keys,
                paged.values,
                paged.on_device(paged.tables),
                paged.on_device(tiles),
                paged.on_device(starts),
                paged.on_device(paged.seq_lens),
                0.11,
                window=window,
                soft_cap=cap,
            )
            near(actual, paged.reference(query, starts, window, cap))


def check_store(sizes: Sizes, dtype: torch.dtype) -> None:
    for _, num_kv_heads, dim in sizes.heads:
        keys, values = torch.randn((2, sizes.rows, num_kv_heads, dim), device=sizes.device, dtype=dtype)
        slots = torch.randperm(16 * sizes.rows, device=sizes.device)[: sizes.rows]
        expected = torch.zeros((2, sizes.rows, num_kv_heads, 16, dim), device=sizes.device, dtype=dtype)
        actual = expected.clone()
        store_kv_reference(keys, values, slots, expected[0].transpose(2, 3), expected[1])
        store_kv.store_kv(keys, values, slots, actual[0].transpose(2, 3), actual[1])
        assert torch.equal(actual, expected)


def check_norm(sizes: Sizes, dtype: torch.dtype) -> None:
    x = torch.randn((sizes.rows, sizes.hidden), device=sizes.device, dtype=dtype)
    weight = torch.randn(sizes.hidden, device=sizes.device, dtype=dtype)
    residual = torch.randn((sizes.rows, sizes.hidden), device=sizes.device)
    near(rms_norm.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    added = residual.clone()
    actual = rms_norm.rms_norm(x, weight, 1e-5, added)
    assert torch.equal(added, residual + x.float())
    near(actual, rms_norm_reference(residual + x.float(), weight, 1e-5))


def check_rotary(sizes: Sizes, dtype: torch.dtype) -> None:
    for num_heads, num_kv_heads, dim in sizes.heads:
        both = num_heads + num_kv_heads
        given = torch.randn((sizes.rows, both, dim), device=sizes.device, dtype=dtype)
        cos_sin = torch.randn((500, dim), device=sizes.device)
        positions = torch.randint(0, 500, (sizes.rows,), device=sizes.device)
        norms = torch.randn((2, dim), device=sizes.device, dtype=dtype)
        rotated = given.clone()
        rotary.norm_and_rotate_(rotated, cos_sin, positions)
        near(rotated, rotate_reference(given, cos_sin, positions))
        wide = given.clone().float()
        rotary.norm_and_rotate_(
            given, cos_sin, positions, num_query_heads=num_heads, query_norm=norms[0], key_norm=norms[1], eps=1e-6
        )
        queries = rms_norm_reference(wide[:, :num_heads], norms[0].float(), 1e-6)
        keys = rms_norm_reference(wide[:, num_heads:], norms[1].float(), 1e-6)
        near(given, rotate_reference(torch.cat((queries, keys), 1), cos_sin, positions))


def check_gate(sizes: Sizes, dtype: torch.dtype) -> None:
    gate_up = torch.randn((sizes.rows, 2 * sizes.hidden), device=sizes.device, dtype=dtype)
    near(gate.gate_mul(gate_up), silu_mul_reference(gate_up))
    first, second = gate_up.float().chunk(2, dim=-1)
    near(gate.gate_mul(gate_up, activation="gelu"), torch.nn.functional.gelu(first, approximate="tanh") * second)


def check_scores(sizes: Sizes) -> None:
    """Masks, penalties and log-probabilities."""
    scores = torch.randn((sizes.rows, sizes.vocab), device=sizes.device) * 3
    rows = torch.tensor([sizes.rows - 1, 0], dtype=torch.int32, device=sizes.device)
    words = -(-sizes.vocab // 32)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, words), device=sizes.device).to(torch.int32)
    masked = mask.apply_mask_reference(scores, rows, bits)
    mask.apply_mask_(scores, rows, bits)
    assert torch.equal(scores, masked)
    seen = (torch.rand((2, sizes.vocab), device=sizes.device) < 0.3).to(torch.uint8)
    counts = torch.randint(0, 3, (2, sizes.vocab), dtype=torch.int32, device=sizes.device)
    slots = torch.tensor([1, 0], dtype=torch.int32, device=sizes.device)
    factors = [torch.tensor(pair, device=sizes.device) for pair in ([1.3, 0.5], [0.2, -1.0], [0.1, 1.5])]
    penalized = penalties.penalize_reference(scores, rows, slots, seen, counts, *factors)
    penalties.penalize_(scores, rows, slots, seen, counts, *factors)
    near(scores, penalized)
    token_ids = torch.randint(0, sizes.vocab, (sizes.rows,), dtype=torch.int32, device=sizes.device)
    found, expected = (
        logprobs.gather_logprobs(scores, token_ids),
        logprobs.gather_logprobs_reference(scores, token_ids),
    )
    near(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def check_sampling(sizes: Sizes) -> int:
    """Compare with the draw by its definition; return rows that part at a near tie.

    Logarithms on a device and on the host differ in their last bit, so the two highest sums may change places.
    """
    rng = np.random.default_rng(7)
    rows = 3 * sizes.rows
    scores = torch.randn((rows, sizes.vocab), device=sizes.device) * 2
    temperature = torch.rand(rows, device=sizes.device) * 2
    temperature[:2] = torch.tensor([0.0, 1e-6])
    top_k = torch.from_numpy(rng.integers(0, 60, rows).astype(np.int32)).to(sizes.device)
    top_k[::4] = 0
    keys = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)
    chosen = torch.empty(rows, dtype=torch.int32, device=sizes.device)
    off = torch.ones(rows, device=sizes.device), torch.zeros(rows, device=sizes.device)
    sample.sample(scores, temperature, top_k, *off, sample.keys_on(sizes.device, keys), chosen)
    parted = 0
    for row, got in enumerate(chosen.tolist()):
        own = scores[row].cpu().numpy()
        if float(temperature[row]) < 1e-5:
            assert got == int(own.argmax())
            continue
        own = own / np.float32(float(temperature[row]))
        ids = np.arange(sizes.vocab)
        if int(top_k[row]):
            ids = np.flatnonzero(own >= np.sort(own)[-int(top_k[row])])
        assert got in ids
        sums = own[ids] + gumbel_noise(int(keys[row, 0]), int(keys[row, 1]), ids)
        if got != int(ids[np.argmax(sums)]):
            parted += 1
            assert sums.max() - sums[np.flatnonzero(ids == got)[0]] < 1e-3
    assert parted <= -(-rows // 50)
    return parted


@contextlib.contextmanager
def quiet_interpreter(device: str) -> Iterator[None]:
    """Let the interpreter compute masked lanes too, without a word."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore") if device == "cpu" else contextlib.nullcontext():
        yield


def run(device: str, report: Report) -> None:
    if device == "cpu":
        import support.triton_interpreter  # noqa: F401
    torch.manual_seed(5)
    sizes = sizes_for(device)
    by_type: dict[str, Callable[[Sizes, torch.dtype], None]] = {
        "paged_decode": check_decode,
        "paged_prefill": check_prefill,
        "store_kv": check_store,
        "rms_norm": check_norm,
        "norm_and_rotate": check_rotary,
        "gate": check_gate,
    }
    with quiet_interpreter(device), torch.inference_mode():
        for name, check in by_type.items():
            for dtype in sizes.dtypes:
                try:
                    check(sizes, dtype)
                except Exception as error:
                    raise AssertionError(f"{name}, {dtype}: {error}") from error
        check_scores(sizes)
        parted = check_sampling(sizes)
    report.facts["compared"] = [*by_type, "mask", "penalize", "logprobs", "sample"]
    report.facts["types"] = [str(dtype).removeprefix("torch.") for dtype in sizes.dtypes]
    report.facts["sampled rows that part at a near tie"] = f"{parted} of {3 * sizes.rows}"
    if device == "cpu":
        report.not_run.append("kernels as compiled: needs a device (here by the interpreter, in float32)")
