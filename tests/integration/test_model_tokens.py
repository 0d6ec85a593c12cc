"""The native models against transformers on the same random weights, in float32: chunked, batched, preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support.greedy_rule import assert_greedy
from support.runner_driver import RunnerDriver
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from worker_service.sampling.sampler import NonFiniteLogits
from worker_service.step_work import RowSampling

MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(
        "LlamaForCausalLM",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": tiny_config("MistralForCausalLM", sliding_window=20),
    "qwen2": tiny_config("Qwen2ForCausalLM", sliding_window=13, use_sliding_window=True, max_window_layers=1),
    "qwen3": tiny_config("Qwen3ForCausalLM", num_key_value_heads=1, head_dim=64),
    "odd": tiny_config("LlamaForCausalLM", hidden_size=42, intermediate_size=50, head_dim=14),  # references only
}
# Sizes that one kernel a layer takes, where the CPU has what it needs.
MODELS |= {
    f"{name} in panels": MODELS[name] | {"hidden_size": 96, "intermediate_size": 160}
    for name in ("llama", "mistral", "qwen2", "qwen3")
}


def greedy_together(driver: RunnerDriver, prompts: list[list[int]], count: int, budget: int) -> list[list[int]]:
    """Serve all at once under a small token budget, and preempt every row once, on its third token."""
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting, preempted_once = list(range(len(prompts))), set()
    while any(len(output) < count for output in outputs):
        preempted = [
            row
            for row, output in enumerate(outputs)
            if len(output) == 3 and row not in preempted_once and row in driver.rows
        ]
        preempted_once |= set(preempted)
        new = [driver.enter(row, prompts[row]) for row in waiting[:2]]
        del waiting[:2]
        left, scheduled = budget, {}
        for row, state in driver.rows.items():
            computed = 0 if row in preempted else state.num_computed
            wanted = min(left, len(state.tokens) - computed)
            if wanted > 0 and len(outputs[row]) < count:
                scheduled[row] = wanted
                left -= wanted
        for row, token in driver.step(scheduled, new=new, preempted=preempted).items():
            outputs[row].append(token)
    return outputs


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path, config, num_files=2)
    rng = random.Random(1)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in (1, 2, 15, 16, 17, 33, 60, 47)]
    driver = RunnerDriver(tmp_path, budget=37)
    outputs = greedy_together(driver, prompts, 14, budget=37)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert_greedy(model, list(zip(prompts, outputs, strict=True)))
    # The tokens are a weak witness where the scores are far apart: compare some scores too.
    expected = model(torch.tensor([prompts[5]])).logits[0, -1]
    torch.testing.assert_close(driver.logits[5][0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(tmp_path: Path, dtype: str) -> None:
    write_checkpoint(tmp_path, MODELS["qwen3"])
    prompt = [random.Random(2).randrange(211) for _ in range(50)]
    scores = []
    for one in ("float32", dtype):
        driver = RunnerDriver(tmp_path, dtype=one)
        driver.generate(0, prompt, 1, chunk=23)
        scores.append(driver.logits[0][0])
    assert float((scores[1] - scores[0]).norm() / scores[0].norm()) < 0.03


def test_a_forked_and_a_seeded_row_and_block_copies(tmp_path: Path) -> None:
    """Samples that share a prompt's blocks draw what they draw alone."""
    import numpy as np

    from worker_service.step_work import Mode, NewRow, StepWork, TableChange, TableOp

    write_checkpoint(tmp_path, MODELS["llama"])
    prompt = list(range(20, 57))
    sampling = RowSampling(temperature=1.0, seed=5)

    def fresh(sample_index: int) -> list[int]:
        driver = RunnerDriver(tmp_path)
        new = driver.enter(0, prompt, sampling)
        object.__setattr__(new, "sample_index", sample_index)
        output = list(driver.step({0: len(prompt)}, new=[new]).values())
        return output + [driver.step({0: 1})[0] for _ in range(5)]

    driver = RunnerDriver(tmp_path)
    driver.step({0: len(prompt)}, new=[driver.enter(0, prompt, sampling)])
    shared, mine = driver.rows[0].blocks[:2], [driver._free.pop(), driver._free.pop()]
    fork = NewRow(
        req_index=3,
        row_key=99,
        request_id="r0",
        sample_index=1,
        token_ids=np.zeros(0, np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=len(prompt) - 1,
        num_prefill_tokens=len(prompt),
        sampling=sampling,
        fork_of=0,
    )
    output = []
    for step in range(6):
        work = StepWork(
            step=50 + step,
            mode=Mode.RUN,
            block_copies=((0, driver.rows[0].blocks[2], mine[0]),) if step == 0 else (),
            new_rows=(fork,) if step == 0 else (),
            table_changes=(TableChange(3, 0, TableOp.REPLACE, (*shared, *mine)),) if step == 0 else (),
            rows=np.array([3], np.int32),
            num_computed_tokens=np.array([len(prompt) - 1 + step], np.int32),
            num_scheduled_tokens=np.array([1], np.int32),
            samples=np.array([True]),
        )
        driver._samples = [3]
        driver.runner.apply(work)
        output += driver.runner.execute(work).token_ids.tolist()
    assert output == fresh(1)
    assert output != fresh(0)


def test_warm_up_and_profile_leave_no_trace(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MODELS["mistral"])
    prompt = list(range(40))
    driver = RunnerDriver(tmp_path)
    plain = driver.generate(0, prompt, 6)
    driver.runner.reset()
    facts = driver.runner.profile_memory(0.9)
    assert facts.kv_bytes >= driver.facts.block_bytes
    assert facts.step_us_per_token > 0
    driver.runner.allocate_kv_cache(200)
    driver.runner.warm_up((16, 4), True, lambda share, what: None)
    assert driver.generate(0, prompt, 6) == plain
    assert driver.runner.known_tokens(0) == prompt + plain


def test_a_model_whose_logits_are_not_finite_is_refused_before_it_serves(tmp_path: Path) -> None:
    config = MODELS["llama"]
    tensors = tiny_tensors(config)
    tensors["model.norm.weight"][3] = float("nan")
    driver = RunnerDriver(write_checkpoint(tmp_path / "broken", config, tensors))
    with pytest.raises(NonFiniteLogits, match="not finite: already before the first request"):
        driver.runner.warm_up((), True, lambda share, what: None)
    with pytest.raises(NonFiniteLogits, match="not finite: row 0, position 3"):
        driver.step({0: 3}, new=[driver.enter(0, [1, 2, 3])])
