"""Build the messages of a call from plain Python values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict

from maniple.v1 import inference_pb2, sampling_pb2


class Message(TypedDict, total=False):
    """One message of a conversation. ``role`` and ``content`` are the usual ones."""

    role: str
    content: str
    name: str
    tool_call_id: str
    tool_calls: list[Any]


class Sampling(TypedDict, total=False):
    """How to sample. What is left out keeps the server's default, see sampling.proto."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    seed: int
    n: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    logprobs: int
    prompt_logprobs: int
    logprobs_mode: sampling_pb2.LogprobsMode.ValueType
    truncate_prompt_tokens: int
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    structured_output: sampling_pb2.StructuredOutput


class Options(Sampling, total=False):
    """What ``generate`` takes beside the prompt: how to sample, and how the server treats the request."""

    request_id: str
    model: str
    priority: int
    cache_salt: str
    skip_reading_prefix_cache: bool
    only_final: bool
    skip_text: bool
    detach_grace_s: float
    lora: str


Pooling = Literal["last", "mean"]
_POOLINGS = {"last": inference_pb2.EmbedRequest.POOLING_LAST, "mean": inference_pb2.EmbedRequest.POOLING_MEAN}
Messages = Iterable[Message | Mapping[str, Any]]
_SAMPLING_NAMES = frozenset(Sampling.__annotations__)


def chat_prompt(messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> inference_pb2.ChatPrompt:
    """Return a conversation as the server takes it."""
    prompt = inference_pb2.ChatPrompt(tools_json=json.dumps(list(tools)) if tools else "")
    for one in messages:
        calls = one.get("tool_calls")
        prompt.messages.add(
            role=one["role"],
            content=one.get("content") or "",
            name=one.get("name", ""),
            tool_call_id=one.get("tool_call_id", ""),
            tool_calls_json=json.dumps(calls) if calls else "",
        )
    return prompt


def only_one(**prompts: object) -> Literal[True]:
    """Refuse none or several ways of saying what to continue."""
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) != 1:
        raise TypeError(f"exactly one of {', '.join(prompts)} is needed, got {' and '.join(given) or 'none'}")
    return True


def generate_request(
    prompt: str | None, token_ids: Iterable[int] | None, messages: Messages | None, options: Options
) -> inference_pb2.GenerateRequest:
    """Return the request of one generation. Raises ``TypeError`` and ``ValueError`` for what no message can hold."""
    only_one(prompt=prompt, token_ids=token_ids, messages=messages)
    values: dict[str, Any] = dict(options)
    sampling = {name: values.pop(name) for name in list(values) if name in _SAMPLING_NAMES}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    request = inference_pb2.GenerateRequest(sampling=sampling_pb2.SamplingParams(**sampling), **values)
    if prompt is not None:
        request.text = prompt
    elif token_ids is not None:
        # Set even when empty, so that the server can say what is wrong with it.
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=token_ids))
    else:
        request.chat.CopyFrom(chat_prompt(messages or ()))
    return request


def tokenize_request(
    text: str | None, messages: Messages | None, model: str, add_special_tokens: bool | None
) -> inference_pb2.TokenizeRequest:
    """Return the request that turns text or a conversation into tokens."""
    only_one(text=text, messages=messages)
    request = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if text is not None:
        request.text = text
    else:
        request.chat.CopyFrom(chat_prompt(messages or ()))
    return request


@dataclass(frozen=True, slots=True)
class Embedding:
    """A prompt as a vector, as long as the model's hidden size."""

    vector: tuple[float, ...]
    num_prompt_tokens: int

    @classmethod
    def of(cls, response: inference_pb2.EmbedResponse) -> Self:
        """Read an answer."""
        return cls(tuple(response.embedding), response.num_prompt_tokens)


def embed_request(
    prompt: str | None,
    token_ids: Iterable[int] | None,
    pooling: Pooling,
    normalize: bool | None,
    model: str,
    request_id: str,
) -> inference_pb2.EmbedRequest:
    """Return the request that turns a prompt into a vector."""
    only_one(prompt=prompt, token_ids=token_ids)
    if pooling not in _POOLINGS:
        raise ValueError(f"pooling={pooling!r}: must be one of {', '.join(map(repr, _POOLINGS))}")
    request = inference_pb2.EmbedRequest(
        request_id=request_id, model=model, pooling=_POOLINGS[pooling], normalize=normalize
    )
    if prompt is not None:
        request.text = prompt
    else:
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=token_ids))
    return request
