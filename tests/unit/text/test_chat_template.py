"""Chat templates: what transformers renders, and what the sandbox refuses."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import transformers

from control_plane.text import template_sandbox
from control_plane.text.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate
from service_chassis.errors import InvalidParameter

USER = {"role": "user", "content": "What is “it”?\n <b>"}
ANSWER = {"role": "assistant", "content": "It is  so. "}
TOOLS = [{"type": "function", "function": {"name": "füg", "parameters": {"type": "object", "a": [1, None, "<>&'"]}}}]

# Constructs that the templates of models in the field use.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
        " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "blocks": (
        "{{ bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {% if loop.first and message.role == 'system' %}\n"
        "        {% set system = message.content | trim %}\n"
        "        {% continue %}\n"
        "    {% endif %}\n"
        "[{{ loop.index0 % 2 }}|{{ message['role'] | upper }}] {{ message.content | trim }}{{ eos_token }}\n"
        "    {% if loop.index > 5 %}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}[A]{% endif %}"
    ),
    "tools": (
        "{% set ns = namespace(n=0) %}{% if tools is not none %}{{ tools | tojson(indent=2) }}"
        "{% for tool in tools %}{% set ns.n = ns.n + 1 %}{{ ns.n }}: {{ tool.function | tojson }}{% endfor %}"
        "{% endif %}"
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{{ '%s!' % m.role }}"
        "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
        "{% macro tail(x) %}<{{ x | default('?') }}>{% endmacro %}{{ tail(mood) }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content[:4] }}{{ m.content.split('\\n')[-1] }}{% endif %}{% endfor %}"
    ),
}


def rendered_by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [messages], chat_template=source, bos_token="<s>", eos_token="</s>", **options
    )
    return str(rendered[0][0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages", [[USER], [{"role": "system", "content": " Be. "}, USER, ANSWER, USER]], ids=["one", "four"]
)
def test_rendering_equals_transformers(name: str, add_generation_prompt: bool, messages: list[dict[str, Any]]) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        messages, tools=TOOLS, add_generation_prompt=add_generation_prompt, template_args={"mood": "calm"}
    )
    theirs = rendered_by_transformers(
        source, messages, tools=TOOLS, add_generation_prompt=add_generation_prompt, mood="calm"
    )
    assert ours == theirs


@pytest.mark.parametrize("content", ["It is", "It is  so. ", "\nso"])
def test_continued_message_equals_transformers(content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    source = TEMPLATES["chatml"]
    ours = ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    theirs = rendered_by_transformers(source, messages, continue_final_message=True)
    assert ours == theirs


def test_continued_message_excludes_a_generation_prompt() -> None:
    with pytest.raises(InvalidParameter, match="excludes"):
        ChatTemplate(TEMPLATES["chatml"], {}).render([USER], continue_final_message=True)


def test_template_that_leaves_the_last_message_out_cannot_continue_it() -> None:
    with pytest.raises(InvalidParameter, match="leaves the last message out"):
        ChatTemplate("fixed", {}).render([USER], add_generation_prompt=False, continue_final_message=True)


def test_refusal_of_a_template_reaches_the_client_in_its_words() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidParameter, match="roles must alternate"):
        ChatTemplate(source, {}).render([USER])


def test_time_of_day_is_available() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([USER]) == time.strftime("%Y")


def test_rendering_leaves_the_messages_as_they_were() -> None:
    messages = [dict(USER), dict(ANSWER)]
    before = json.dumps(messages)
    ChatTemplate(TEMPLATES["chatml"], {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


GROW = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = "
HOSTILE = {
    "insides": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "mutation": "{{ messages.append(1) }}",
    "import": "{% include '/etc/passwd' %}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repeated-list": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 9**9**9 }}",
    "concat": GROW + "ns.x ~ ns.x %}{% endfor %}",
    "sum": GROW + "ns.x + ns.x %}{% endfor %}",
    "replace": GROW + "ns.x.replace('a', 'aaaaaaaaaaaaaaaaaaaaaaaa') %}{% endfor %}",
    "join": GROW + "[ns.x, ns.x] | join %}{% endfor %}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent-star": "{{ '%*d' % (999999999, 1) }}",
    "format-filter": "{{ '%999999999d' | format(1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format-nested": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "nesting": "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "syntax": "{% if %}",
    "size": "a" * (MAX_TEMPLATE_BYTES + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_an_invalid_parameter_within_its_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_S", 0.2)
    began = time.monotonic()
    with pytest.raises(InvalidParameter):
        ChatTemplate(HOSTILE[name], {}).render([USER])
    assert time.monotonic() - began < 5


def test_transformers_is_the_one_we_compare_with() -> None:
    # render_jinja_template is not public; a new home for it should fail here and not look like a wrong template.
    assert hasattr(transformers.utils.chat_template_utils, "render_jinja_template")
