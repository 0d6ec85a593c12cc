"""Turn what a client wants continued into token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from control_plane.doors.limits import check_token_ids, parse_json
from control_plane.text.model_text import ModelText
from maniple.v1.inference_pb2 import ChatPrompt
from service_chassis.errors import InvalidParameter

T = TypeVar("T")

# Shorter texts are tokenized at once, in well under a millisecond; longer ones in a thread, beside the event loop.
_INLINE_CHARS = 4096


def max_chars(model: ModelText, max_model_len: int) -> int | None:
    """Return the length of text that is too long for the context whatever its tokens are; None: it has no such length.

    Tokenizing much longer text would only tell, after seconds, what its length tells at once.
    """
    token_chars = model.tokenizer.max_token_chars
    return None if token_chars is None else token_chars * max_model_len


async def text_to_ids(
    text: str, model: ModelText, *, limit: int | None = None, add_special_tokens: bool = True
) -> list[int]:
    """Tokenize a text prompt of at most ``limit`` characters. Raises ``InvalidParameter``, also for an empty one."""
    if not text:
        raise InvalidParameter("text", text, "must not be empty")
    _check_length("text", text, limit)
    encode = model.tokenizer.encode
    return await _run(len(text), lambda: encode(text, add_special_tokens=add_special_tokens))


async def chat_to_ids(
    chat: ChatPrompt, model: ModelText, *, limit: int | None = None, add_special_tokens: bool = False
) -> list[int]:
    """Render a conversation, to at most ``limit`` characters, and tokenize it.

    The template writes special tokens itself.
    """
    messages, options = _messages(chat), _options(chat)
    if chat.chat_template:
        text = await model.client_templates.render(chat.chat_template, model.special_tokens, messages, **options)
        return await _run(len(text), lambda: _encode(text, model, limit, add_special_tokens))
    template = model.chat_template
    if template is None:
        raise InvalidParameter("chat", "no template", "the model has no chat template; send chat_template, or text")
    found = template

    def render_and_encode() -> list[int]:
        return _encode(found.render(messages, **options), model, limit, add_special_tokens)

    return await _run(chat.ByteSize(), render_and_encode)


def _encode(text: str, model: ModelText, limit: int | None, add_special_tokens: bool) -> list[int]:
    _check_length("chat", text, limit)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return a prompt of token ids as it is, or raise ``InvalidParameter``."""
    if not token_ids:
        raise InvalidParameter("token_ids", [], "must not be empty")
    check_token_ids("token_ids", token_ids, vocab_size)
    return list(token_ids)


async def ids_to_text(token_ids: Sequence[int], model: ModelText, *, skip_special_tokens: bool) -> str:
    """Detokenize."""
    decode = model.tokenizer.decode
    return await _run(len(token_ids), lambda: decode(token_ids, skip_special_tokens=skip_special_tokens))


def _check_length(field: str, text: str, limit: int | None) -> None:
    if limit is not None and len(text) > limit:
        raise InvalidParameter(field, f"{len(text)} characters", f"may have at most {limit} characters")


async def _run(num_chars: int, function: Callable[[], T]) -> T:
    return function() if num_chars < _INLINE_CHARS else await asyncio.to_thread(function)


def _messages(chat: ChatPrompt) -> list[Mapping[str, Any]]:
    if not chat.messages:
        raise InvalidParameter("chat.messages", [], "must hold at least one message")
    messages: list[Mapping[str, Any]] = []
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidParameter(f"chat.messages[{index}].role", message.role, "must not be empty")
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            entry["name"] = message.name
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        if message.tool_calls_json:
            entry["tool_calls"] = parse_json(f"chat.messages[{index}].tool_calls_json", message.tool_calls_json, list)
        messages.append(entry)
    return messages


def _options(chat: ChatPrompt) -> dict[str, Any]:
    add_generation_prompt = not chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        add_generation_prompt = chat.add_generation_prompt
    return {
        "tools": parse_json("chat.tools_json", chat.tools_json, list),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "template_args": parse_json("chat.template_args_json", chat.template_args_json, dict),
    }
