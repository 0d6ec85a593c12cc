"""Render conversations with a model's chat template, as transformers does, in a sandbox.

Templates of models are trusted no more than those of clients: see template_sandbox.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from control_plane.text.template_sandbox import TemplateEnvironment, TemplateRefused, said
from service_chassis.errors import InvalidParameter

MAX_TEMPLATE_BYTES = 128 * 1024
MAX_PROMPT_CHARS = 8 * 1024 * 1024
_CONTINUE_MARK = "\x00continue\x00"  # no template and no text holds NUL


class ChatTemplate:
    """One compiled template. Rendering has no side effects; each rendering has its own budget."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Args:
            source: Jinja2.
            special_tokens: variables like ``bos_token`` that templates expect.
        Raises:
            InvalidParameter: the source is too large or no valid template.
        """
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise InvalidParameter("chat_template", len(source), f"must have at most {MAX_TEMPLATE_BYTES} bytes")
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise InvalidParameter("chat_template", source, f"is no valid template: {said(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: with ``role`` and ``content`` and what else the template knows.
            tools: JSON schemas of functions, for templates that know tools.
            add_generation_prompt: end with the head of the assistant's turn.
            continue_final_message: end inside the last message, which is to be continued.
            template_args: more variables; they win over the special tokens.
        Raises:
            InvalidParameter: the template refused the conversation, or broke a bound.
        """
        if continue_final_message:
            if add_generation_prompt:
                rule = "excludes add_generation_prompt"
                raise InvalidParameter("continue_final_message", continue_final_message, rule)
            last = dict(messages[-1])
            # The mark shows where the last message ends in the prompt, whatever the template puts around it.
            last["content"] = str(last.get("content", "")) + _CONTINUE_MARK
            messages = [*messages[:-1], last]
        variables = {
            **self._special_tokens,
            **(template_args or {}),
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(variables)
        if continue_final_message:
            text, mark, _ = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise InvalidParameter("continue_final_message", True, "the template leaves the last message out")
        return text

    def _render(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        roles = [message.get("role") for message in variables["messages"]]
        self._environment.begin()
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_PROMPT_CHARS:
                    raise TemplateRefused(f"the prompt grew beyond {MAX_PROMPT_CHARS} characters")
                parts.append(part)
        except Exception as error:  # a template can raise anything: it is a program of somebody else
            raise InvalidParameter("chat", roles, f"the chat template failed: {said(error)}") from error
        return "".join(parts)
