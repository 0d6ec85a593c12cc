"""Rule (b) of docs/equality.md: a batch-invariant model's scores have the same bits however they were computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.demo_model import demo_directory
from support.runner_driver import RunnerDriver
from support.tiny_checkpoints import tiny_config, write_checkpoint

TINY: dict[str, dict[str, Any]] = {
    "llama": tiny_config("LlamaForCausalLM", hidden_size=96, intermediate_size=208, tie_word_embeddings=True),
    "mistral": tiny_config("MistralForCausalLM", sliding_window=20),
    "qwen3": tiny_config("Qwen3ForCausalLM", num_key_value_heads=1, head_dim=64),
    "mistral in panels": tiny_config("MistralForCausalLM", sliding_window=20, hidden_size=96, intermediate_size=160),
}


def check_scores(directory: Path, tokens: list[int], start: int, **options: Any) -> None:
    """Assert that the scores after every token from ``start`` on are equal, however they came to be computed."""
    driver = RunnerDriver(directory, batch_invariant=True, **options)
    rng = random.Random(4)

    def decode(row: int, *, chunk: int, crowd: int = 0, preempt_at: int = -1) -> list[Tensor]:
        """Compute ``start`` tokens in chunks, then force one token after the other; return the scores of each."""
        mates = {100 + i: [rng.randrange(200) for _ in range(rng.randint(1, 40))] for i in range(crowd)}
        mates = {row + 1 + i: prompt for i, prompt in enumerate(mates.values())}
        driver.logits.clear()
        new = [driver.enter(row, tokens[:start])] + [driver.enter(mate, prompt) for mate, prompt in mates.items()]
        position = start
        while position <= len(tokens):
            preempted = [row] if position == preempt_at else []
            preempt_at = -1 if preempted else preempt_at
            scheduled = {}
            for one, state in driver.rows.items():
                missing = len(state.tokens) - (0 if one in preempted else state.num_computed)
                scheduled[one] = min(missing, chunk if one == row else 7)
            sampled = driver.step(scheduled, new=new, preempted=preempted)
            new = []
            if row in sampled:
                driver.teacher_force(row, tokens[position : position + 1])
                position += 1
        scores = driver.logits[row]
        driver.step({}, finished=list(driver.rows))
        return scores

    whole = decode(0, chunk=10_000)
    assert len(whole) == len(tokens) - start + 1
    for name, got in {
        "chunked": decode(1, chunk=13),
        "in a crowd": decode(2, chunk=29, crowd=6),
        "recomputed": decode(0, chunk=17, crowd=2, preempt_at=start + 2),
    }.items():
        assert all(torch.equal(one, other) for one, other in zip(whole, got, strict=True)), name
    # The last scores again, by one prefill of everything: decode and prefill agree to the bit.
    driver.logits.clear()
    driver.step({0: len(tokens)}, new=[driver.enter(0, tokens)])
    assert torch.equal(driver.logits[0][0], whole[-1])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("config", TINY.values(), ids=TINY.keys())
def test_scores_have_the_same_bits_on_tiny_models(tmp_path: Path, config: dict[str, Any], num_threads: int) -> None:
    write_checkpoint(tmp_path, config)
    tokens = [random.Random(3).randrange(211) for _ in range(75)]
    check_scores(tmp_path, tokens, 67, num_threads=num_threads)


@pytest.mark.parametrize("quantization", ["int8", "q4"])
def test_scores_of_quantized_weights_have_the_same_bits(tmp_path: Path, quantization: str) -> None:
    write_checkpoint(tmp_path, TINY["mistral in panels"])
    tokens = [random.Random(3).randrange(211) for _ in range(75)]
    check_scores(tmp_path, tokens, 67, num_threads=2, quantization=quantization)


def test_scores_have_the_same_bits_on_the_demo_model() -> None:
    tokens = [random.Random(3).randrange(49152) for _ in range(52)]
    check_scores(demo_directory(), tokens, 49, num_threads=2)
