"""Translate between ``vllm.grpc.engine`` and ``maniple.v1``.

In that contract most fields have no presence: zero means unset, and unset means the default. Only ``temperature``,
``max_tokens``, ``seed`` and the logprobs say whether they were set.
"""

from __future__ import annotations

from smg_grpc_proto import vllm_engine_pb2

from control_plane.doors.sampling_rules import MAX_LOGPROBS
from control_plane.generation import FinishReason
from maniple.v1 import inference_pb2, sampling_pb2
from service_chassis.errors import InvalidParameter, NotBuilt

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}

_ZERO_IS_UNSET = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "n",
)
_HAS_PRESENCE = ("temperature", "max_tokens")
_NOT_BUILT = (
    "kv_transfer_params",
    "mm_inputs",
    "kv_transfer_params_json",
    "media_refs",
)


def to_maniple(request: vllm_engine_pb2.GenerateRequest, *, max_prompt_tokens: int) -> inference_pb2.GenerateRequest:
    """Return the same request in our words.

    Args:
        request: theirs.
        max_prompt_tokens: what the model takes and still has room for one token: truncation to -1 means that.
    Raises:
        InvalidParameter, NotBuilt: it cannot be said.
    """
    for field in _NOT_BUILT:
        if request.HasField(field):
            raise NotBuilt(f"{field} is not supported by this server")
    if request.extra_mm_inputs:
        raise NotBuilt("extra_mm_inputs is not supported by this server")
    translated = inference_pb2.GenerateRequest(
        request_id=request.request_id,
        sampling=_sampling(request.sampling_params, max_prompt_tokens),
        only_final=not request.stream,
        skip_text=True,  # this contract carries ids; its client has the tokenizer
    )
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        translated.token_ids.ids.extend(request.tokenized.input_ids)
        translated.token_ids.SetInParent()
    elif kind == "text":
        translated.text = request.text
    return translated


def to_embed(request: vllm_engine_pb2.EmbedRequest) -> inference_pb2.EmbedRequest:
    """Return the same request in our words; how to pool is not said there."""
    translated = inference_pb2.EmbedRequest(request_id=request.request_id)
    if request.HasField("tokenized"):
        translated.token_ids.ids.extend(request.tokenized.input_ids)
        translated.token_ids.SetInParent()
    return translated


def _sampling(params: vllm_engine_pb2.SamplingParams, max_prompt_tokens: int) -> sampling_pb2.SamplingParams:
    wanted = sampling_pb2.SamplingParams(
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        # No effect on ids, and with stop strings the text is searched as a client sees it.
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    for field in _ZERO_IS_UNSET:
        if value := getattr(params, field):
            try:
                setattr(wanted, field, value)
            except ValueError:
                raise InvalidParameter(field, value, "must be below 2147483648") from None
    for field in _HAS_PRESENCE:
        if params.HasField(field):
            setattr(wanted, field, getattr(params, field))
    if params.HasField("seed") and params.seed != -1:  # which stands for none there
        wanted.seed = params.seed % (1 << 64)  # signed there, unsigned here
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise InvalidParameter("logit_bias", token_id, "must be inside the vocabulary")
        wanted.logit_bias[token_id] = bias
    if params.HasField("truncate_prompt_tokens") and params.truncate_prompt_tokens == -1:
        wanted.truncate_prompt_tokens = max_prompt_tokens
    elif params.HasField("truncate_prompt_tokens"):
        if params.truncate_prompt_tokens < 1:
            raise InvalidParameter("truncate_prompt_tokens", params.truncate_prompt_tokens, "must be -1 or at least 1")
        wanted.truncate_prompt_tokens = params.truncate_prompt_tokens
    for field in ("logprobs", "prompt_logprobs"):
        if params.HasField(field):
            if (count := getattr(params, field)) < 0:
                raise InvalidParameter(field, count, f"must be in [0, {MAX_LOGPROBS}]: not all of the vocabulary")
            setattr(wanted, field, count)
    if (constraint := params.WhichOneof("constraint")) == "choice":
        wanted.structured_output.choice.options.extend(params.choice.choices)
        wanted.structured_output.choice.SetInParent()
    elif constraint is not None:
        setattr(wanted.structured_output, constraint, getattr(params, constraint))
    return wanted
