"""Defaults and clipping of sampling parameters. What is out of range is in the table of test_doors_inference."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest

from control_plane.doors.limits import check_number
from control_plane.doors.sampling_rules import resolve_sampling, resolve_text, room_for_logprobs
from control_plane.generation import SamplingChoice
from control_plane.text.model_text import GenerationDefaults, load_model_text
from maniple.v1.sampling_pb2 import SamplingParams
from service_chassis.errors import InvalidParameter
from service_chassis.protocol.logprobs import Logprobs

MODEL = load_model_text("scripted")
END = 256


def resolve(room: int = 50, defaults: GenerationDefaults | None = None, **wanted: Any) -> SamplingChoice:
    model = MODEL if defaults is None else dataclasses.replace(MODEL, defaults=defaults)
    return resolve_sampling(SamplingParams(**wanted), model, vocab_size=260, room=room, draw_seed=lambda: 77)


def test_unset_means_the_documented_defaults() -> None:
    assert resolve() == SamplingChoice(max_tokens=50, seed=77, eos_ids=frozenset({END}))


def test_logprobs_are_told_as_asked_and_never_more_than_there_are_ids() -> None:
    choice = resolve(logprobs=0, prompt_logprobs=20, logprobs_mode=2)
    assert (choice.num_logprobs, choice.num_prompt_logprobs, choice.logprobs_mode) == (0, 20, 2)
    few = resolve_sampling(SamplingParams(logprobs=9), MODEL, vocab_size=5, room=4, draw_seed=lambda: 0)
    assert (few.num_logprobs, few.num_prompt_logprobs) == (5, None)


def room(num_prompt_tokens: int = 10, *, only_final: bool = True, context: int = 10**6, **wanted: Any) -> int:
    return room_for_logprobs(
        SamplingParams(**wanted), num_prompt_tokens=num_prompt_tokens, room=context, only_final=only_final
    )


def test_output_that_goes_in_one_message_has_room_for_its_logprobs() -> None:
    assert room() == 10**6
    assert room(logprobs=20, only_final=False) == 10**6  # chunks are cut as needed
    for count in (0, 5, 20):
        most = room(logprobs=count)
        assert _bytes_of(most, count) <= 3 << 20
        assert room(logprobs=count, max_tokens=most) == most
        assert room(logprobs=count, max_tokens=10**6, context=most) == most  # clipped to the context anyway
        with pytest.raises(InvalidParameter, match=f"logprobs={count}: of max_tokens {most + 1} do not fit"):
            room(logprobs=count, max_tokens=most + 1)


def test_prompt_whose_logprobs_fit_no_message_is_refused_with_what_would() -> None:
    assert room(128 * 1024, prompt_logprobs=0) == 10**6
    with pytest.raises(InvalidParameter) as caught:
        room(128 * 1024, prompt_logprobs=20)
    most = int(caught.value.rule.rpartition("of ")[2].split()[0])
    assert _bytes_of(most, 20) <= 3 << 20
    room(most, prompt_logprobs=20)
    with pytest.raises(InvalidParameter, match="do not fit into the one message"):  # nothing is left for the output
        room(most, prompt_logprobs=20, logprobs=20, max_tokens=1000)


def _bytes_of(num_tokens: int, num_likeliest: int) -> int:
    """The largest that so many positions can be in a message: ids of three bytes, no value left out."""
    columns = Logprobs(num_likeliest + 1)
    columns.token_ids.extend([2**21 - 1] * (num_likeliest + 1))
    columns.values.extend([-1.5] * (num_likeliest + 1))
    columns.ranks.append(2**21 - 1)
    one = len(columns.to_message().SerializeToString())
    return one * num_tokens


def test_unset_takes_the_models_generation_config_first() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, max_tokens=9)
    choice = resolve(defaults=defaults)
    assert (choice.temperature, choice.top_p, choice.top_k) == (0.6, 0.9, 40)
    assert (choice.min_p, choice.repetition_penalty, choice.max_tokens) == (0.1, 1.1, 9)


def test_a_set_value_wins_over_the_generation_config_even_where_it_is_zero() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=40, min_p=0.1)
    choice = resolve(defaults=defaults, temperature=0.0, top_k=0, min_p=0.0)
    assert (choice.temperature, choice.top_k, choice.min_p) == (0.0, 0, 0.0)


@pytest.mark.parametrize("top_k", [0, -1, 260, 2**31 - 1])
def test_top_k_that_keeps_every_token_is_off(top_k: int) -> None:
    assert resolve(top_k=top_k).top_k == 0


def test_tiny_temperature_is_kept_for_the_sampler_to_take_as_greedy() -> None:
    assert resolve(temperature=1e-6).temperature == pytest.approx(1e-6)


def test_tokens_are_clipped_to_the_context() -> None:
    choice = resolve(room=4, min_tokens=20)
    assert (choice.max_tokens, choice.min_tokens) == (4, 4)
    assert resolve(room=4, max_tokens=1000).max_tokens == 4


def test_ignore_eos_drops_the_end_of_text_and_keeps_stop_ids() -> None:
    choice = resolve(ignore_eos=True, stop_token_ids=[7, 7])
    assert (choice.eos_ids, choice.stop_token_ids) == (frozenset(), frozenset({7}))


def test_seed_is_drawn_only_where_none_was_given() -> None:
    assert resolve(seed=0).seed == 0
    assert resolve(seed=2**64 - 1).seed == 2**64 - 1


def test_bad_word_is_banned_at_the_beginning_and_behind_a_space() -> None:
    assert resolve(bad_words=["no", " no"]).bad_words == (tuple(b"no"), tuple(b" no"))


def test_lists_of_ids_are_sorted_and_without_repeats() -> None:
    choice = resolve(allowed_token_ids=[9, 3, 9], logit_bias={5: 1.0, 2: -1.0})
    assert choice.allowed_token_ids == (3, 9)
    assert choice.logit_bias == ((2, -1.0), (5, 1.0))


def test_stop_ids_that_leave_no_first_token_are_refused_in_a_small_vocabulary_too() -> None:
    def few(**wanted: Any) -> SamplingChoice:
        return resolve_sampling(SamplingParams(**wanted), MODEL, vocab_size=3, room=5, draw_seed=lambda: 1)

    assert few(stop_token_ids=[0, 1, 2]).stop_token_ids == {0, 1, 2}
    assert few(stop_token_ids=[0, 2], min_tokens=1).min_tokens == 1
    with pytest.raises(InvalidParameter, match=r"stop_token_ids=\[0, 1, 2\]: must leave an id"):
        few(stop_token_ids=[0, 1, 2], min_tokens=1)


def test_text_choice_keeps_stops_in_order_without_repeats() -> None:
    choice = resolve_text(SamplingParams(stop=["b", "a", "b"], skip_special_tokens=False), skip_text=True)
    assert choice.stop == ("b", "a")
    assert (choice.skip_special_tokens, choice.skip_text) == (False, True)
    assert resolve_text(SamplingParams(), skip_text=False).skip_special_tokens


@pytest.mark.parametrize("penalty", [1e-38, 0.009, 0.0, 10.5])
def test_a_repetition_penalty_that_scores_cannot_bear_is_refused(penalty: float) -> None:
    with pytest.raises(InvalidParameter, match=r"repetition_penalty=.* must be in \[0.01, 10\]"):
        resolve(repetition_penalty=penalty)


def test_more_allowed_ids_than_a_delta_should_carry_are_refused() -> None:
    allowed = range(2**18 + 1)
    with pytest.raises(InvalidParameter, match=r"allowed_token_ids=.*may have at most 262144"):
        resolve_sampling(
            SamplingParams(allowed_token_ids=allowed), MODEL, vocab_size=2**20, room=5, draw_seed=lambda: 1
        )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", 0, "max_tokens=0: "),
        ("n", 0, "n=0: "),
        ("top_k", -7, "top_k=-7: "),
        ("top_p", 1.1, "top_p=1.1: "),
    ],
)
def test_a_refused_number_is_told_as_it_was_given(field: str, value: float, said: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        resolve(**{field: value})
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.1, 0.7), (-2.0, 2.0)])
def test_bound_is_inside_its_range_when_it_came_as_thirty_two_bits(low: float, high: float) -> None:
    for bound in (low, high):
        as_sent = struct.unpack("f", struct.pack("f", bound))[0]
        assert check_number("value", as_sent, low, high) == as_sent
    for outside in (low - 1e-3, high + 1e-3):
        with pytest.raises(InvalidParameter, match="must be in"):
            check_number("value", outside, low, high)
