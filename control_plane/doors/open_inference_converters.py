"""Translate between ``inference`` (KServe v2) and ``maniple.v1``.

Names and meaning of inputs, outputs and parameters are those of Triton's vLLM backend, so that its clients need no
change. What they may ask for beyond that contract's types is JSON, see ``sampling_json``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from control_plane.doors.limits import check_request_id, parse_json
from control_plane.doors.sampling_json import read_sampling
from control_plane.doors.tensors import (
    BOOL,
    BYTES,
    FP32,
    UINT32,
    InferRequest,
    InferResponse,
    add_counts,
    add_floats,
    add_texts,
    read_inputs,
)
from control_plane.generation import Chunk, FinishReason, SampleFinished
from maniple.v1.inference_pb2 import GenerateRequest
from service_chassis.errors import InvalidParameter, UnknownModel, clip
from service_chassis.protocol.logprobs import Logprobs

VERSION = "1"
FINAL = "triton_final_response"

TEXT, FINISH, NUM_IN, NUM_OUT = "text_output", "finish_reason", "num_input_tokens", "num_output_tokens"
LOGPROBS, CUMULATIVE = "logprobs", "cumulative_logprob"
# Input -> type; those after the first may be left out.
INPUTS: Mapping[str, str] = {
    "text_input": BYTES,
    "stream": BOOL,
    "sampling_parameters": BYTES,
    "exclude_input_in_output": BOOL,
    "return_finish_reason": BOOL,
    "return_num_input_tokens": BOOL,
    "return_num_output_tokens": BOOL,
    "return_logprobs": BOOL,
    "return_cumulative_logprob": BOOL,
}
# Output -> type; an element for each sample, but of num_input_tokens, which has one.
OUTPUTS: Mapping[str, str] = {
    TEXT: BYTES,
    FINISH: BYTES,
    NUM_IN: UINT32,
    NUM_OUT: UINT32,
    LOGPROBS: BYTES,
    CUMULATIVE: FP32,
}
_SWITCHED = {name: f"return_{name}" for name in OUTPUTS if name != TEXT}
# What JSON has no number for: vLLM's own for minus infinity.
_LEAST_LOGPROB = -9999.0
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
_NOT_FINISHED = "None"  # what that backend says

# It goes back with every response.
_MAX_ID_CHARS = 1024
_EMPTY_FINAL = "triton_enable_empty_final_response"
_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What one request asks for."""

    generate: GenerateRequest
    model_name: str
    request_id: str  # the client's, given back as it is; it need not be unique, and may be empty
    streams: bool
    prefix: str  # goes before the text of every sample
    outputs: frozenset[str]
    timeout_s: float | None


def to_wanted(request: InferRequest, *, default_model: str, may_stream: bool) -> Wanted:
    """Read a ModelInferRequest.

    Raises:
        InvalidParameter: names field, value and rule.
        UnknownModel: it asks for another version. Whether the name is served is seen later.
    """
    check_version(request.model_version)
    if len(request.id) > _MAX_ID_CHARS:
        raise InvalidParameter("id", f"{len(request.id)} characters", f"may have at most {_MAX_ID_CHARS} characters")
    inputs = read_inputs(request, INPUTS)
    if "text_input" not in inputs:
        raise InvalidParameter("inputs", sorted(inputs), "must have text_input")
    text = _text("text_input", inputs["text_input"])
    streams = bool(inputs.get("stream", False))
    if streams and not may_stream:
        raise InvalidParameter("stream", True, "must be false in ModelInfer; ModelStreamInfer streams")
    # That backend gives the prompt back unless it streams or is told not to.
    excludes_input = bool(inputs.get("exclude_input_in_output", streams))
    if streams and not excludes_input:
        raise InvalidParameter("exclude_input_in_output", False, "must be true with stream")
    sampling = parse_json(
        "sampling_parameters", _text("sampling_parameters", inputs.get("sampling_parameters", b"")), dict
    )
    custom = _Parameters.of(request)
    if twice := sorted(custom.sampling.keys() & (sampling or {}).keys()):
        raise InvalidParameter(
            f"parameters.{twice[0]}", custom.sampling[twice[0]], "must not be in sampling_parameters too"
        )
    params = read_sampling("sampling_parameters.", sampling or {})
    params.MergeFrom(read_sampling("parameters.", custom.sampling))
    if params.HasField("prompt_logprobs"):
        rule = "must be unset: this protocol has no output for them"
        raise InvalidParameter("prompt_logprobs", params.prompt_logprobs, rule)
    outputs = _outputs(request, inputs, has_logprobs=params.HasField("logprobs"))
    if outputs & {LOGPROBS, CUMULATIVE} and not params.HasField("logprobs"):
        params.logprobs = 0  # of the sampled tokens alone
    return Wanted(
        generate=GenerateRequest(
            request_id=_unique_id(request.id),
            model=request.model_name,
            text=text,
            sampling=params,
            priority=custom.priority,
            only_final=not streams,
        ),
        model_name=request.model_name or default_model,
        request_id=request.id,
        streams=streams,
        prefix="" if excludes_input else text,
        outputs=outputs,
        timeout_s=custom.timeout_s,
    )


def check_version(version: str) -> None:
    """Raise ``UnknownModel`` unless a version is unset or the only one."""
    if version not in ("", VERSION):
        raise UnknownModel(f"model_version={clip(repr(version), 120)}: there is only version {VERSION!r}")


@dataclass(slots=True)
class _Parameters:
    """The parameters beside the tensors. Those that the protocol does not define are the sampler's."""

    priority: int = 0
    timeout_s: float | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: InferRequest) -> _Parameters:
        found = cls()
        for name, parameter in request.parameters.items():
            kind = parameter.WhichOneof("parameter_choice")
            value = getattr(parameter, kind) if kind else None
            where = f"parameters.{name}"
            if name == "priority":
                found.priority = _whole(where, value, 0, _MAX_PRIORITY)
            elif name == "timeout":
                # Microseconds; 0 is none.
                timeout_us = _whole(where, value, 0, 2**63 - 1)
                found.timeout_s = timeout_us / 1e6 if timeout_us else None
            elif name == _EMPTY_FINAL:
                # The last response says that it is the last and is never empty: there is nothing to add to it.
                if kind != "bool_param":
                    raise InvalidParameter(where, value, "must be a bool_param")
            elif name.startswith(("sequence_", "triton_")):
                raise InvalidParameter(where, value, "is not supported by this server")
            else:
                found.sampling[name] = value
        return found


def _whole(where: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(where, value, f"must be a whole number in [{low}, {high}]")
    return value


def _text(name: str, value: bytes | bool) -> str:
    assert isinstance(value, bytes), "its type was checked"
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidParameter(name, f"{len(value)} bytes", "must be UTF-8") from None


def _unique_id(client_id: str) -> str:
    """Return an id for the engine. Clients of this protocol number their requests, and two of them do so alike."""
    suffix = secrets.token_hex(8)
    try:
        check_request_id(client_id[:96])
    except InvalidParameter:
        return f"kserve-{suffix}"
    return f"{client_id[:96]}-{suffix}"


def _outputs(request: InferRequest, inputs: Mapping[str, bytes | bool], *, has_logprobs: bool) -> frozenset[str]:
    """Return the outputs that are named; or, where none is, all that there are and that are not switched off."""
    named = [output.name for output in request.outputs]
    for name in named:
        if name not in OUTPUTS:
            raise InvalidParameter("outputs.name", name, f"is no output of this model; there are {', '.join(OUTPUTS)}")
    there = [name for name in OUTPUTS if has_logprobs or name not in (LOGPROBS, CUMULATIVE)]
    wanted = named or [name for name in there if inputs.get(_SWITCHED.get(name, ""), True)]
    return frozenset([*wanted, *(name for name, switch in _SWITCHED.items() if inputs.get(switch, False))])


class Answers:
    """Turns the events of one request into responses: its state is what was said of each sample."""

    def __init__(
        self, wanted: Wanted, make_response: type[InferResponse], num_samples: int, decode: Callable[[int], str]
    ) -> None:
        """Begin; responses are made by ``make_response``, and ``decode`` gives the text of a token."""
        self._wanted = wanted
        self._make_response = make_response
        self._reasons = [_NOT_FINISHED] * num_samples
        self._new_text = [wanted.prefix] * num_samples
        self._new_tokens = [0] * num_samples
        self._num_input_tokens = 0
        self._decode = decode
        self._new_logprobs: list[list[dict[str, Any]]] = [[] for _ in range(num_samples)]
        self._cumulative = [0.0] * num_samples

    def start(self, num_prompt_tokens: int) -> None:
        """Note what the prompt has."""
        self._num_input_tokens = num_prompt_tokens

    def add(self, event: Chunk | SampleFinished) -> None:
        """Note what a sample has got since the last response, or that it ended."""
        if isinstance(event, Chunk):
            self._new_text[event.index] += event.text
            self._new_tokens[event.index] += len(event.token_ids)
            if event.logprobs is not None:
                self._add_logprobs(event.index, event.logprobs)
        else:
            self._reasons[event.index] = _FINISH_REASONS[event.reason]

    def _add_logprobs(self, index: int, told: Logprobs) -> None:
        width = told.width
        for place, rank in enumerate(told.ranks):
            here = slice(place * width, (place + 1) * width)
            ids, values = told.token_ids[here], told.values[here]
            if not rank:  # lost with an owner
                self._new_logprobs[index].append({})
                continue
            self._cumulative[index] += values[0]
            ranks = (rank, *range(1, width))
            self._new_logprobs[index].append(
                {
                    str(token_id): {
                        "logprob": max(value, _LEAST_LOGPROB),
                        "rank": of_token,
                        "decoded_token": self._decode(token_id),
                    }
                    for token_id, value, of_token in zip(ids, values, ranks, strict=True)
                }
            )

    @property
    def has_ended(self) -> bool:
        """Whether every sample ended."""
        return _NOT_FINISHED not in self._reasons

    def response(self) -> InferResponse:
        """Return what is new, an element for each sample."""
        wanted = self._wanted
        response = empty_response(wanted.model_name, wanted.request_id, self._make_response, is_last=self.has_ended)
        if TEXT in wanted.outputs:
            add_texts(response, TEXT, self._new_text)
        if FINISH in wanted.outputs:
            add_texts(response, FINISH, self._reasons)
        if NUM_IN in wanted.outputs:
            add_counts(response, NUM_IN, [self._num_input_tokens])
        if NUM_OUT in wanted.outputs:
            add_counts(response, NUM_OUT, self._new_tokens)
        if LOGPROBS in wanted.outputs:
            add_texts(response, LOGPROBS, [json.dumps(tokens) for tokens in self._new_logprobs])
        if CUMULATIVE in wanted.outputs:
            add_floats(response, CUMULATIVE, self._cumulative)
        self._new_text = [""] * len(self._new_text)
        self._new_tokens = [0] * len(self._new_tokens)
        self._new_logprobs = [[] for _ in self._new_logprobs]
        return response


def empty_response(
    model_name: str, request_id: str, make_response: type[InferResponse], *, is_last: bool
) -> InferResponse:
    """Return a response without outputs."""
    response = make_response(model_name=model_name, model_version=VERSION, id=request_id)
    response.parameters[FINAL].bool_param = is_last
    return response
