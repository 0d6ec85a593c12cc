"""The scripted runner against its definition, written out here one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from service_chassis.errors import InvalidParameter, NotBuilt
from service_chassis.protocol.arrays import block_terms, gumbel_array, mix_array, noise_bits_array, token_terms_sum
from service_chassis.protocol.digest import MASK64, StateDigest, block_term, mix, row_factor, token_term
from service_chassis.protocol.noise import noise_bits, noise_key
from service_chassis.scripted import ScriptedOptions, fail_at, parse_scripted, scripted_model
from support.scripted_driver import BLOCK, PROMPT, Driver, generate, new_row, table
from support.scripted_reference import greedy, seeded
from worker_service.scripted import InjectedFault
from worker_service.step_work import FinishedRow, RowSampling, TableOp


def test_greedy_output_is_the_argmax_of_the_definition() -> None:
    driver = Driver()
    assert generate(driver, 0, PROMPT, 7) == greedy(PROMPT, 7)
    assert driver.runner.known_tokens(0) == PROMPT + greedy(PROMPT, 7)


def test_tokens_do_not_depend_on_chunks_or_mates() -> None:
    driver = Driver()
    other = [9, 9]
    driver.run(
        {0: (0, 2, False), 1: (0, 2, True)},
        new_rows=(new_row(0, PROMPT), new_row(1, other)),
        table_changes=(table(0, 4), table(1, 2, 3)),
    )
    out = driver.run({0: (2, 3, True), 1: (2, 1, True)}, table_changes=(table(0, 9, op=TableOp.APPEND),))
    assert out == [greedy(PROMPT, 1)[0], greedy(other, 2)[1]]


def test_wrong_block_table_changes_the_tokens() -> None:
    driver = Driver()
    driver.run({0: (0, 3, False)}, new_rows=(new_row(0, PROMPT),), table_changes=(table(0, 4, 5),))
    assert driver.run({0: (3, 2, True)}, table_changes=(table(0, 7, 5),)) != greedy(PROMPT, 1)


def test_preempted_row_recomputes_to_the_same_tokens() -> None:
    driver = Driver()
    first = generate(driver, 0, PROMPT, 3)
    known = len(PROMPT) + 3
    driver.run({}, preempted=(0,))
    resumed = driver.run({0: (0, known, True)}, table_changes=(table(0, 30, 31, 32, 33),))
    assert first + resumed == greedy(PROMPT, 4)


def test_fork_shares_the_prompt_and_draws_its_own_noise() -> None:
    driver = Driver()
    sampling = RowSampling(temperature=0.7, seed=99)
    driver.run({0: (0, 5, True)}, new_rows=(new_row(0, PROMPT, sampling=sampling),), table_changes=(table(0, 1, 2, 3),))
    fork = new_row(
        1, [], num_prompt_tokens=5, num_computed_tokens=4, num_prefill_tokens=5, fork_of=0, sample_index=1,
        sampling=sampling,
    )  # fmt: skip
    out = driver.run(
        {0: (5, 1, True), 1: (4, 1, True)},
        block_copies=((0, 2, 9),),
        new_rows=(fork,),
        table_changes=(table(1, 1, 9, 8),),
    )
    assert out == [seeded(PROMPT, 2, 99, 0, 0.7)[1], seeded(PROMPT, 1, 99, 1, 0.7)[0]]


def test_seeded_output_is_the_draw_of_the_definition() -> None:
    sampling = RowSampling(temperature=0.8, seed=2**63 + 11)
    out = generate(Driver(), 0, PROMPT, 8, sampling=sampling)
    assert out == seeded(PROMPT, 8, 2**63 + 11, 0, 0.8)


def test_block_copies_read_all_sources_before_any_write() -> None:
    driver = Driver()
    generate(driver, 0, PROMPT, 1)
    before = driver.runner._slots.reshape(-1, BLOCK).copy()
    driver.run({}, block_copies=((0, 1, 2), (0, 2, 1)))
    after = driver.runner._slots.reshape(-1, BLOCK)
    assert (after[[1, 2]] == before[[2, 1]]).all()


def test_min_tokens_masks_stop_ids() -> None:
    wanted = greedy(PROMPT, 1)[0]
    out = generate(Driver(), 0, PROMPT, 2, sampling=RowSampling(min_tokens=1, stop_ids=(wanted,)))
    assert out[0] != wanted


def test_forced_output_goes_by_output_index_then_ends() -> None:
    options = ScriptedOptions(forced=(65, 66), forced_by_prompt={tuple(PROMPT): (1, 2, 3)})
    assert generate(Driver(options), 0, [9], 4) == [65, 66, 256, 256]
    assert generate(Driver(options), 0, PROMPT, 4) == [1, 2, 3, 256]


def test_token_digest_follows_the_known_tokens() -> None:
    driver = Driver()
    generate(driver, 0, PROMPT, 2)
    known = driver.runner.known_tokens(0)
    expected = sum(token_term(row_factor(77), position, token) for position, token in enumerate(known)) & MASK64
    assert driver.output.token_digest == expected
    driver.run({}, finished=(FinishedRow(0, 1, 6),))
    assert driver.output.token_digest == 0


def test_row_that_needs_the_full_sampler_is_refused_with_the_sentence() -> None:
    with pytest.raises(NotBuilt, match="the scripted model without torch serves greedy, seeded and forced output"):
        generate(Driver(ScriptedOptions(sampler="numpy")), 0, PROMPT, 1, sampling=RowSampling(temperature=1.0, top_k=5))


def test_faults_fire_at_their_step_on_their_rank() -> None:
    driver = Driver(ScriptedOptions(faults=(fail_at(0, 2), fail_at(1, 1), fail_at(0, 3, "wrong_digest"))))
    driver.run({})
    with pytest.raises(InjectedFault, match="rank 0, step 2"):
        driver.run({})
    driver.run({})
    assert driver.output.token_digest == 1


@pytest.mark.parametrize(
    ("json", "field"),
    [
        ('{"nonsense": 1}', "nonsense"),
        ('{"forced": [260]}', "forced"),
        ('{"vocab": ["a"]}', "vocab"),
        ('{"vocab": ["a", "a"]}', "vocab"),
        ('{"faults": [{"rank": 0, "step": 1, "kind": "explode"}]}', "faults"),
        ('{"step_time_s": -1}', "step_time_s"),
        ('{"max_position": 1.5}', "max_position"),
        ('{"forced_by_prompt": {"1 x": [2]}}', "forced_by_prompt"),
        ("[]", "model"),
        ("/nowhere.json", "model"),
    ],
)
def test_wrong_model_string_names_the_key(json: str, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_scripted(f"scripted:{json}")
    assert caught.value.field.endswith(field)


def test_model_string_reads_back_as_it_was_written() -> None:
    options = ScriptedOptions(
        step_time_s=0.25,
        vocab=("a", "b", "<end>"),
        forced=(0, 1),
        forced_by_prompt={(0, 1): (1,)},
        faults=(fail_at(1, 5, "exit", after_s=0.5),),
        sampler="numpy",
    )
    assert parse_scripted(scripted_model(options)) == options
    assert scripted_model(ScriptedOptions()) == "scripted"
    assert parse_scripted("demo") is None
    assert parse_scripted("scripted-llama") is None


def test_arrays_agree_with_the_scalar_definitions() -> None:
    values = [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF]
    assert mix_array(np.array(values, np.uint64)).tolist() == [mix(value) for value in values]
    ids = np.array([0, 1, 255, 49151, 2**32 - 1], np.uint32)
    seed, index, position = 2**64 - 3, 7, 4095
    k0, k1 = noise_key(seed, index, position)
    bits = noise_bits_array(k0, k1, ids)
    assert bits.tolist() == [noise_bits(k0, k1, int(i)) for i in ids]
    assert np.isfinite(gumbel_array(np.array([0, 2**32 - 1], np.uint32))).all()
    tokens = [3, 1, 4, 1, 5]
    expected = sum(token_term(row_factor(9), 2 + i, token) for i, token in enumerate(tokens)) & MASK64
    assert token_terms_sum(9, 2, tokens) == expected
    blocks = [7, 0, 2**32 - 1, 8]
    terms = [block_term(row_factor(9), 3, 5 + i, block) for i, block in enumerate(blocks)]
    assert block_terms(row_factor(9), 3, 5, blocks) == terms


def test_blocks_count_the_same_put_at_once_or_one_by_one() -> None:
    at_once, one_by_one = StateDigest(), StateDigest()
    for digest in (at_once, one_by_one):
        digest.add(4, 2**63 + 1)
        digest.put_blocks(4, 0, 2, [9, 9])  # which are replaced
    blocks = [*range(100, 140)]
    at_once.put_blocks(4, 0, 1, blocks)
    for index, block in enumerate(blocks, 1):
        one_by_one.put_blocks(4, 0, index, [block])
    assert (
        at_once.value
        == one_by_one.value
        == sum(block_term(row_factor(2**63 + 1), 0, i, b) for i, b in enumerate(blocks, 1)) & MASK64
    )
    for digest in (at_once, one_by_one):
        digest.remove(4, 0)
        assert digest.value == 0
