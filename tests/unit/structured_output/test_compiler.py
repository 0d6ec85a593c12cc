"""Compile what clients send: once, within bounds, and whatever it does to the process that tries it first."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.bounded_child import frame, read_frame
from control_plane.structured_output import checker, checker_process, compiler
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from control_plane.structured_output.vocabulary import vocabulary_of
from control_plane.text.model_text import load_model_text
from service_chassis.errors import InvalidParameter, QueueFull

TEXT = load_model_text("scripted")


@pytest.fixture
async def grammars() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: TEXT)
    yield made
    await made.close()


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def schema(value: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def _proc(pid: int | None, name: str = "") -> Path:
    return Path("/proc", str(pid), name)


SLOW = schema({"type": "object", "patternProperties": {f"^(a|b){{{i}}}c.*": {} for i in range(1, 300)}})


async def refused(grammars: GrammarCompiler, constraint: Constraint) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        await grammars.compile(constraint)
    return caught.value


async def test_constraint_is_compiled_once_however_many_ask(grammars: GrammarCompiler) -> None:
    assert grammars.checker_pid is None
    first, second = await asyncio.gather(grammars.compile(regex("a+")), grammars.compile(regex("a+")))
    assert first is second is await grammars.compile(regex("a+"))
    assert await grammars.compile(regex("b+")) is not first


async def test_one_who_goes_away_takes_it_from_nobody(grammars: GrammarCompiler) -> None:
    waits = [asyncio.create_task(grammars.compile(regex("a+"))) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    assert (await waits[1]).constraint == regex("a+")


async def test_what_cannot_be_served_is_named(grammars: GrammarCompiler) -> None:
    error = await refused(grammars, schema({"type": "array", "uniqueItems": True}))
    assert error.field == "sampling.structured_output.json_schema"
    assert "uniqueItems" in error.message
    error = await refused(grammars, Constraint(ConstraintKind.STRUCTURAL_TAG, '{"format": {"type": "xml"}}'))
    assert error.field == "sampling.structured_output.structural_tag.format.type"
    error = await refused(grammars, schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}))
    assert "cannot be met" in error.message


async def test_bombs_are_refused_and_the_next_one_works(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = "\n".join(f'r{i}: r{i + 1} r{i + 1} | "{i}"' for i in range(6000))
    bombs = {
        # A stack of rules that no recursion survives; intersections that fill the memory.
        ("nested too deeply",): Constraint(ConstraintKind.GRAMMAR, f'start: r0\n{rules}\nr6000: "z"'),
        ("memory", "takes more than"): schema(
            {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(60)]}
        ),
        ("too large",): schema(
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(12)]}
        ),
    }
    pids = set()
    for signs, bomb in bombs.items():
        await grammars.compile(regex("a|b"))
        message = (await refused(grammars, bomb)).message
        assert any(sign in message for sign in signs), message
        pids.add(grammars.checker_pid)
    assert (await grammars.compile(regex("after"))).constraint == regex("after")
    assert len(pids - {None}) == 1  # the others took their process along


async def test_half_a_character_is_refused_in_every_kind(grammars: GrammarCompiler) -> None:
    """JSON can say it; text cannot hold it."""
    for kind, text in [
        (ConstraintKind.JSON_SCHEMA, '{"const": "\\ud800"}'),
        (ConstraintKind.STRUCTURAL_TAG, '{"format": {"type": "const_string", "value": "\\ud800"}}'),
        (ConstraintKind.STRUCTURAL_TAG, '{"format": {"type": "regex", "pattern": "a\\udfff"}}'),
    ]:
        async with asyncio.timeout(20):
            await refused(grammars, Constraint(kind, text))
    assert "come in pairs" in (await refused(grammars, Constraint(kind, text))).message


async def test_checker_that_fails_is_gone_at_once_and_the_next_one_answers(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in it that nobody thought of: it must not keep the others waiting."""
    await grammars.compile(regex("a"))
    pid = grammars.checker_pid
    monkeypatch.setattr(checker_process, "as_message", lambda constraint: {"kind": "of no kind"})
    async with asyncio.timeout(20):
        assert "the attempt failed" in (await refused(grammars, regex("b"))).message
        monkeypatch.undo()
        await grammars.compile(regex("b"))
    assert grammars.checker_pid not in (None, pid)


async def test_checker_that_does_not_answer_is_ended(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grammars.compile(regex("a"))
    pid = grammars.checker_pid
    monkeypatch.setattr(checker_process, "ANSWER_TIMEOUT_S", 0.2)
    assert "takes more than 0.2 s" in (await refused(grammars, SLOW)).message
    monkeypatch.undo()
    await grammars.compile(regex("b"))
    assert grammars.checker_pid not in (None, pid)


async def test_checker_has_little_of_everything(grammars: GrammarCompiler) -> None:
    await grammars.compile(regex("a"))
    limits = _proc(grammars.checker_pid, "limits").read_text()
    rows = {line[:25].strip(): line[25:].split()[0] for line in limits.splitlines()[1:]}
    assert int(rows["Max cpu time"]) <= checker.CPU_S + 60
    assert int(rows["Max data size"]) < checker.MEMORY_BYTES + (4 << 30)
    assert rows["Max core file size"] == "0"


async def test_too_many_that_wait_are_turned_away(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING", 2)
    waits = [asyncio.create_task(grammars.compile(regex(f"a{{{i}}}"))) for i in range(1, 3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await grammars.compile(regex("b"))
    await asyncio.gather(*waits)


async def test_memory_of_grammars_is_bounded_and_comes_back(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [await grammars.compile(regex(text)) for text in ("used", "too")]
    await grammars.compile(regex("kept"))  # which nobody holds, so it may go
    monkeypatch.setattr(compiler, "MAX_LIVE_BYTES", sum(grammar.num_bytes for grammar in used))
    with pytest.raises(QueueFull):
        await grammars.compile(regex("more"))
    used.clear()
    gc.collect()
    monkeypatch.setattr(compiler, "MAX_LIVE_BYTES", 16 << 20)  # what a small one takes is measured, and not exact
    await grammars.compile(regex("more"))


async def test_model_without_an_end_of_text_has_no_constraints() -> None:
    import dataclasses

    grammars = GrammarCompiler(lambda: dataclasses.replace(TEXT, eos_token_ids=()))
    assert "end of text" in (await refused(grammars, regex("a"))).message
    await grammars.close()


async def test_close_ends_the_process(grammars: GrammarCompiler) -> None:
    await grammars.compile(regex("a"))
    pid = grammars.checker_pid
    await grammars.close()
    assert not _proc(pid).exists()


def test_checker_ends_with_its_parent_also_in_the_middle_of_a_bomb() -> None:
    command = [sys.executable, "-m", "control_plane.structured_output.checker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        process.stdin.write(frame(vocabulary_of(TEXT).to_dict()) + frame(checker.as_message(regex("a"))))
        process.stdin.flush()
        assert read_frame(process.stdout) is not None
        process.stdin.write(frame(checker.as_message(SLOW)))
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.stdin.close()
        assert process.wait(3) == 0
