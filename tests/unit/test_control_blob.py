"""What a control plane writes for the next one is read back whole, and nothing else is taken for it."""

import random

import pytest

from control_plane.control_blob import (
    ResumeRight,
    UnreadableBlob,
    draw_resume_right,
    read_blob,
    sampling_of,
    write_blob,
)
from control_plane.deltas import row_payload
from control_plane.generation import Generation, SamplingChoice, TextChoice
from maniple.v1.control_blob_pb2 import ControlBlob
from service_chassis.ids import RequestId

CHOICES = [
    SamplingChoice(),
    SamplingChoice(
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        max_tokens=77,
        min_tokens=5,
        seed=2**64 - 1,
        n=3,
        eos_ids=frozenset({2, 9}),
        stop_token_ids=frozenset({9, 4}),
        logit_bias=((3, -1.5), (8, 2.0)),
        allowed_token_ids=(1, 5, 6),
        bad_words=((1, 2), (3,)),
        num_logprobs=0,
        num_prompt_logprobs=4,
        logprobs_mode=1,
    ),
]
TEXTS = [
    TextChoice(),
    TextChoice(
        stop=("STOP", "\n\n", "ö🙂"), include_stop_str_in_output=True, skip_special_tokens=False, skip_text=True
    ),
]


def generation(sampling: SamplingChoice, text: TextChoice) -> Generation:
    return Generation(
        request_id=RequestId("r"),
        prompt_token_ids=(1, 2),
        sampling=sampling,
        text=text,
        priority=-3,
        cache_namespace=b"s" * 16,
        skip_reading_prefix_cache=True,
        detach_grace_s=1.5,
        only_final=True,
        client_identity="CN=somebody",
        traceparent="00-aa-bb-01",
    )


def blob_of(place: int, right: ResumeRight) -> bytes:
    sampling = CHOICES[place]
    row = row_payload(sampling).sampling
    return write_blob(generation(sampling, TEXTS[place]), row, arrival_number=1, right=right)


@pytest.mark.parametrize("sampling", CHOICES, ids=["defaults", "everything"])
@pytest.mark.parametrize("text", TEXTS, ids=["plain", "everything"])
def test_blob_and_row_give_the_generation_back(sampling, text):
    original = generation(sampling, text)
    right = draw_resume_right(original.client_identity)
    row = row_payload(sampling).sampling
    facts = read_blob(write_blob(original, row, arrival_number=41, right=right))
    assert sampling_of(row, facts) == sampling
    if sampling.n > 1:  # then no row is needed
        assert sampling_of(facts.sampling, facts) == sampling
        assert facts.cache_namespace == b"s" * 16
    assert facts.text == text
    assert (facts.arrival_number, facts.priority, facts.right) == (41, -3, right)
    assert (facts.detach_grace_s, facts.only_final, facts.skip_reading_prefix_cache) == (1.5, True, True)
    assert facts.traceparent == "00-aa-bb-01"


def test_resume_right_fits_only_its_token_and_its_caller():
    right = draw_resume_right("alice")
    assert right.fits(right.token, "alice")
    assert not right.fits(right.token, "bob")
    assert not right.fits(draw_resume_right("alice").token, "alice")
    assert not right.fits(b"", "alice")


def test_right_of_a_caller_whom_nobody_knows_fits_nobody_who_is_known():
    right = draw_resume_right("")
    assert right.fits(right.token, "")
    assert not right.fits(right.token, "a control plane")
    assert not right.fits(draw_resume_right("").token, "")


def test_resume_token_is_in_no_representation():
    right = draw_resume_right("")
    facts = read_blob(blob_of(0, right))
    assert str(right.token)[2:-1] not in repr(facts)
    assert right.token.hex() not in repr(facts)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xff\xff",
        ControlBlob(version=2, resume_token=b"x" * 16, max_tokens=1, n=1).SerializeToString(),
        ControlBlob(version=1, resume_token=b"short", max_tokens=1, n=1).SerializeToString(),
        ControlBlob(version=1, resume_token=b"x" * 16, n=1).SerializeToString(),
        ControlBlob(version=1, resume_token=b"x" * 16, max_tokens=1, n=2).SerializeToString(),
    ],
    ids=["empty", "garbage", "later-version", "short-token", "no-limit", "no-sampling"],
)
def test_foreign_bytes_are_refused(raw):
    with pytest.raises(UnreadableBlob):
        read_blob(raw)


def test_random_bytes_are_never_taken_for_a_blob():
    rng = random.Random(7)
    for _ in range(2000):
        with pytest.raises(UnreadableBlob):
            read_blob(rng.randbytes(rng.randrange(60)))


def test_fields_of_a_later_release_are_passed_over():
    raw = blob_of(1, draw_resume_right(""))
    later = raw + b"\xa2\x06\x03abc"  # field 100, a string
    assert read_blob(later) == read_blob(raw)
