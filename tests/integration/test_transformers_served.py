"""A model that transformers computes, served to a client by a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.serve_process import SERVING, Caller, serving
from support.tiny_families import greedy, write_family

PROMPTS = [[3 + (7 * row + at * at) % 90 for at in range(size)] for row, size in enumerate((40, 5, 21))]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{index}": index for index in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))


@pytest.mark.timeout(240)
async def test_gemma_2_is_served_by_two_ranks_and_says_what_generate_says(tmp_path: Path) -> None:
    model = write_family(tmp_path, "gemma2")
    write_tokenizer(tmp_path, 96)
    words = ("--model", str(tmp_path), "--tensor-parallel-size", "2", "--max-num-batched-tokens", "16")
    with serving(*words, "--max-num-seqs", "8", "--model-impl", "auto", "--num-kv-blocks", "64") as server:
        async with Caller(server) as caller:
            await caller.healthy(SERVING, within_s=120.0)
            streams = [caller.generate(f"r{row}", prompt, 8) for row, prompt in enumerate(PROMPTS)]
            ended = await asyncio.gather(*(stream.end() for stream in streams))
    assert [stream.error for stream in ended] == [None] * len(PROMPTS)
    assert [stream.token_ids for stream in ended] == [greedy(model, prompt, 8) for prompt in PROMPTS]
