"""Write down with the workers what only the control plane knows of a request, and read what another one wrote.

A control plane stores nothing. What must outlive it (stop strings, output options, who may resume) travels in the
request's first delta as bytes that workers keep and never read (PROTOCOL B8). A protobuf message, and not JSON: two
releases read each other's blobs during a rolling upgrade, and ``buf breaking`` guards that. Never logged.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from control_plane.generation import Generation, SamplingChoice, TextChoice
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from maniple.v1 import sampling_pb2
from maniple.v1.control_blob_pb2 import ControlBlob

_VERSION = 1
_CONSTRAINED_VERSION = 2  # with a constraint, which a reader of version 1 would go on without
_TOKEN_BYTES = 16


class UnreadableBlob(ValueError):
    """A blob of another version, or none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRight:
    """Who may take a request up again. The token is a secret: it is left out of every representation."""

    token: bytes = field(repr=False)
    client_identity: str = ""

    def fits(self, token: bytes, client_identity: str) -> bool:
        """Compare in constant time. A control plane that resumes for a client comes in that client's name."""
        return secrets.compare_digest(token, self.token) and client_identity == self.client_identity


def draw_resume_right(client_identity: str) -> ResumeRight:
    """Return the right to resume a request that was just admitted, bound to its caller."""
    return ResumeRight(token=secrets.token_bytes(_TOKEN_BYTES), client_identity=client_identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFacts:
    """What a blob says. Fields as in control_blob.proto."""

    arrival_number: int
    right: ResumeRight
    priority: int
    detach_grace_s: float
    n: int
    max_tokens: int
    min_tokens: int
    eos_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    text: TextChoice
    only_final: bool
    skip_reading_prefix_cache: bool
    traceparent: str
    constraint: Constraint | None
    ignores_eos: bool  # with a constraint
    sampling: sampling_pb2.RowSampling | None  # with several samples
    cache_namespace: bytes  # with several samples


def write_blob(
    generation: Generation, row: sampling_pb2.RowSampling, *, arrival_number: int, right: ResumeRight
) -> bytes:
    """Return the blob of a generation that is being admitted, whose rows are sampled as ``row`` says."""
    sampling, text = generation.sampling, generation.text
    blob = ControlBlob(
        version=_VERSION if sampling.constraint is None else _CONSTRAINED_VERSION,
        arrival_number=arrival_number,
        priority=generation.priority,
        resume_token=right.token,
        client_identity=right.client_identity,
        detach_grace_s=generation.detach_grace_s,
        max_tokens=sampling.max_tokens,
        eos_ids=sorted(sampling.eos_ids),
        stop_token_ids=sorted(sampling.stop_token_ids),
        stop=text.stop,
        include_stop_str_in_output=text.include_stop_str_in_output,
        skip_special_tokens=text.skip_special_tokens,
        no_spaces_between_special_tokens=not text.spaces_between_special_tokens,
        skip_text=text.skip_text,
        only_final=generation.only_final,
        skip_reading_prefix_cache=not generation.reads_prefix_cache,
        traceparent=generation.traceparent,
        n=sampling.n,
        min_tokens=sampling.min_tokens,
    )
    if sampling.constraint is not None:
        blob.structured_output.CopyFrom(constraint_message(sampling.constraint))
        blob.ignore_eos = sampling.ignores_eos
    if sampling.n > 1:
        blob.sampling.CopyFrom(row)
        blob.cache_namespace = generation.cache_namespace
    return blob.SerializeToString()


def read_blob(raw: bytes) -> ControlFacts:
    """Return what a blob says. Raises ``UnreadableBlob``, whose text holds nothing of it."""
    try:
        blob = ControlBlob.FromString(raw)
    except DecodeError:
        raise UnreadableBlob("not a ControlBlob") from None
    if not _VERSION <= blob.version <= _CONSTRAINED_VERSION:
        raise UnreadableBlob(f"version {blob.version}, and this release reads {_VERSION} to {_CONSTRAINED_VERSION}")
    if (
        len(blob.resume_token) != _TOKEN_BYTES
        or not (blob.max_tokens and blob.n)
        or (blob.n > 1 and not blob.HasField("sampling"))
        or blob.HasField("structured_output") is not (blob.version == _CONSTRAINED_VERSION)
    ):
        raise UnreadableBlob("incomplete")
    return ControlFacts(
        arrival_number=blob.arrival_number,
        right=ResumeRight(token=blob.resume_token, client_identity=blob.client_identity),
        priority=blob.priority,
        detach_grace_s=blob.detach_grace_s,
        n=blob.n,
        max_tokens=blob.max_tokens,
        min_tokens=blob.min_tokens,
        eos_ids=frozenset(blob.eos_ids),
        stop_token_ids=frozenset(blob.stop_token_ids),
        text=TextChoice(
            stop=tuple(blob.stop),
            include_stop_str_in_output=blob.include_stop_str_in_output,
            skip_special_tokens=blob.skip_special_tokens,
            spaces_between_special_tokens=not blob.no_spaces_between_special_tokens,
            skip_text=blob.skip_text,
        ),
        only_final=blob.only_final,
        skip_reading_prefix_cache=blob.skip_reading_prefix_cache,
        traceparent=blob.traceparent,
        constraint=constraint_of(blob.structured_output) if blob.HasField("structured_output") else None,
        ignores_eos=blob.ignore_eos,
        sampling=blob.sampling if blob.HasField("sampling") else None,
        cache_namespace=blob.cache_namespace,
    )


def constraint_message(constraint: Constraint) -> sampling_pb2.StructuredOutput:
    """Write a constraint down as a client would."""
    message = sampling_pb2.StructuredOutput()
    if constraint.kind is ConstraintKind.CHOICE:
        message.choice.options.extend(constraint.options)
    elif constraint.kind is ConstraintKind.JSON_OBJECT:
        message.json_object = True
    else:
        setattr(message, constraint.kind.value, constraint.text)
    return message


def constraint_of(message: sampling_pb2.StructuredOutput) -> Constraint:
    """Read what ``constraint_message`` wrote. Raises ``UnreadableBlob``."""
    which = message.WhichOneof("constraint")
    if which is None:
        raise UnreadableBlob("incomplete")
    kind = ConstraintKind(which)
    text = getattr(message, which)
    if kind is ConstraintKind.CHOICE:
        return Constraint(kind, options=tuple(message.choice.options))
    return Constraint(kind, "" if kind is ConstraintKind.JSON_OBJECT else text)


def sampling_of(row: sampling_pb2.RowSampling, facts: ControlFacts) -> SamplingChoice:
    """Return the sampling choice from which ``row_payload`` made ``row``, with what the blob adds to it."""
    return SamplingChoice(
        temperature=row.temperature,
        top_p=row.top_p,
        top_k=row.top_k,
        min_p=row.min_p,
        repetition_penalty=row.repetition_penalty,
        presence_penalty=row.presence_penalty,
        frequency_penalty=row.frequency_penalty,
        max_tokens=facts.max_tokens,
        min_tokens=facts.min_tokens,
        constraint=facts.constraint,
        ignores_eos=facts.ignores_eos,
        seed=row.seed,
        n=facts.n,
        eos_ids=facts.eos_ids,
        stop_token_ids=facts.stop_token_ids,
        logit_bias=tuple(zip(row.logit_bias_ids, row.logit_bias_values, strict=True)),
        allowed_token_ids=tuple(row.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in row.bad_words),
        num_logprobs=row.num_logprobs_plus_one - 1 if row.num_logprobs_plus_one else None,
        num_prompt_logprobs=row.num_prompt_logprobs_plus_one - 1 if row.num_prompt_logprobs_plus_one else None,
        logprobs_mode=int(row.logprobs_mode),
    )
