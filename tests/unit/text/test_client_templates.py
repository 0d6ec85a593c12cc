"""Templates that clients send: rendered as ours are, and whatever one takes or breaks, this process stays as it is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.text import client_templates
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.client_templates import ClientTemplates
from service_chassis.errors import InvalidParameter, NotReady, QueueFull

USER: dict[str, Any] = {"role": "user", "content": "Is it? é😀 \x00"}
MEGABYTE = "'x' * 1000000"
BOMBS = {
    # The first, since it may cost the process its life before it meets the bound of memory.
    "shown": (
        "{% set ns = namespace(a=['x']) %}{% for i in range(27) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}"
    ),
    "joined": f"{{{{ ([{MEGABYTE}] * 4000) | join | length }}}}",
    "told-apart": f"{{% set a = {MEGABYTE} %}}{{% set b = {' ~ '.join(['a'] * 4000)} %}}",
    "replaced": f"{{{{ ('a' * 4000).replace('a', {MEGABYTE}) | length }}}}",
    "formatted": f"{{{{ ('{{0}}' * 4000).format({MEGABYTE}) | length }}}}",
    "indented": "{{ ('a\n' * 4000) | indent(1000000) | length }}",
}


@pytest.fixture
def templates() -> Iterator[ClientTemplates]:
    made = ClientTemplates()
    yield made
    made.close()
    made._child.end()


def peak_bytes(templates: ClientTemplates) -> int:
    """The most memory that the process ever had."""
    assert templates._child._process is not None
    status = Path(f"/proc/{templates._child._process.pid}/status").read_text()
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) << 10


async def test_rendering_is_that_of_our_own_process(templates: ClientTemplates) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ tools | tojson }}{{ mood }}"
    )
    options: dict[str, Any] = {"tools": [{"a": [1, None]}], "template_args": {"mood": "calm"}}
    special_tokens = {"bos_token": "<s>"}
    expected = ChatTemplate(source, special_tokens).render([USER], **options)
    assert await templates.render(source, special_tokens, [USER], **options) == expected


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% if %}", "chat_template='{% if %}': is no valid template"),
        ("{{ raise_exception('roles must alternate') }}", "chat=['user']: the chat template failed: roles must"),
        ("a" * 200_000, "chat_template=200000: must have at most"),
    ],
)
async def test_refusals_are_those_of_our_own_process(templates: ClientTemplates, source: str, sentence: str) -> None:
    with pytest.raises(InvalidParameter) as told:
        await templates.render(source, {}, [USER])
    assert told.value.message.startswith(sentence)
    with pytest.raises(InvalidParameter) as expected:
        ChatTemplate(source, {}).render([USER])
    assert told.value.message == expected.value.message


async def test_one_step_that_is_worth_gigabytes_is_refused_and_the_next_template_works(
    templates: ClientTemplates,
) -> None:
    async with asyncio.timeout(120):
        for source in BOMBS.values():
            with pytest.raises(InvalidParameter):
                await templates.render(source, {}, [USER])
        assert await templates.render("fixed", {}, [USER]) == "fixed"
    assert peak_bytes(templates) < client_templates.MEMORY_BYTES + (200 << 20)


async def test_process_that_dies_is_told_and_another_one_comes(templates: ClientTemplates) -> None:
    await templates.render("a", {}, [USER])
    first = templates._child._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(InvalidParameter, match="takes more than"):
        await templates.render("b", {}, [USER])
    assert await templates.render("b", {}, [USER]) == "b"


async def test_too_many_that_wait_are_turned_away_and_closing_lets_them_go(
    templates: ClientTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_templates, "MAX_WAITING", 3)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    waits = [asyncio.create_task(templates.render(endless, {}, [USER])) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await templates.render("a", {}, [USER])
    templates.close()
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*waits, return_exceptions=True)
    assert {type(end) for end in ends} == {NotReady}
    with pytest.raises(NotReady):
        await templates.render("a", {}, [USER])


async def test_process_ends_with_what_it_belongs_to() -> None:
    made = ClientTemplates()
    await made.render("a", {}, [USER])
    process = made._child._process
    assert process is not None
    del made
    assert process.poll() == 0
