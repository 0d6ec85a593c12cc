r"""Turn a structural tag into a Lark grammar.

A structural tag is JSON that says which parts of an output are free text and which are not: a tool call between two
markers, say. Two forms are around, and both are read here:

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": ["<function=", ...]}
    {"type": "structural_tag", "format": {"type": "sequence", "elements": [...]}}

Where free text ends at a marker it is a *lazy* lexeme: the first occurrence of the marker ends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from control_plane.structured_output.constraint import BadConstraint
from control_plane.structured_output.lark import ANY_TEXT, literal, one_of, regex

_MAX_DEPTH = 32


def structural_tag_to_lark(text: str) -> str:
    """Return a Lark grammar. Raises ``BadConstraint``."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConstraint(f"must be a JSON object ({error})") from None
    if not isinstance(tag, dict):
        raise BadConstraint("must be a JSON object")
    writer = _Writer()
    if "format" in tag:
        start = writer.format(tag["format"], "format", 0)
    else:
        start = writer.triggered(_of_structures(tag), "", 0)
    return "\n".join(["%llguidance {}", f"start: {start or literal_nothing()}", *writer.rules]) + "\n"


def literal_nothing() -> str:
    """Return what matches the empty text."""
    return '""'


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the older form in the words of the newer one."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not structures:
        _refuse("structures", structures, "must be a list of objects with begin, schema and end; or set format")
    tags = []
    for index, one in enumerate(structures):
        where = f"structures[{index}]"
        if not isinstance(one, dict):
            _refuse(where, one, "must be an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": one.get("schema")}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Collects rules. Each method returns what stands for a format in a rule: a sequence of symbols."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def format(self, wanted: Any, where: str, depth: int) -> str:
        if depth > _MAX_DEPTH:
            _refuse(where, "…", f"may be nested {_MAX_DEPTH} deep")
        kind = wanted.get("type") if isinstance(wanted, dict) else None
        writers: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self.tag,
            "triggered_tags": self.triggered,
            "tags_with_separator": self._tags_with_separator,
        }
        if kind not in writers:
            _refuse(f"{where}.type", kind, f"must be one of {', '.join(writers)}")
        return writers[kind](wanted, where, depth + 1)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body or literal_nothing()}")
        return name

    def _const_string(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        return literal(_text(wanted, "value", where))

    def _json_schema(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        schema = wanted.get("json_schema")
        if not isinstance(schema, dict | bool):
            _refuse(f"{where}.json_schema", schema, "must be a JSON schema")
        # Lark reads an object here.
        return f"%json {json.dumps(schema if isinstance(schema, dict) else _boolean_schema(schema, where))}"

    def _regex(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        return regex(_text(wanted, "pattern", where))

    def _any_text(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        return ANY_TEXT

    def _sequence(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        parts = self._several(wanted, where, depth)
        return " ".join(part for part in parts if part)

    def _or(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        return self._rule(one_of(part or literal_nothing() for part in self._several(wanted, where, depth)))

    def _several(self, wanted: Mapping[str, Any], where: str, depth: int) -> list[str]:
        elements = _list(wanted, "elements", where)
        return [self.format(one, f"{where}.elements[{index}]", depth) for index, one in enumerate(elements)]

    def tag(self, wanted: Mapping[str, Any], where: str, depth: int, *, cut: int = 0) -> str:
        """Write one tag, without the first ``cut`` characters of its begin."""
        begin, end = _text(wanted, "begin", where)[cut:], _text(wanted, "end", where)
        content = wanted.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            body = self._rule(f"{ANY_TEXT} {literal(end)}", lazy=True)
            return f"{literal(begin)} {body}".strip()
        body = self.format(content, f"{where}.content", depth)
        return " ".join(part for part in (literal(begin), body, literal(end)) if part)

    def triggered(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        """Write free text in which a trigger begins a tag."""
        at = f"{where}." if where else ""
        triggers = _list(wanted, "triggers", where)
        for index, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                _refuse(f"{at}triggers[{index}]", trigger, "must be a string that is not empty")
        behind_text, bare = [], []
        for index, one in enumerate(_list(wanted, "tags", where)):
            here = f"{at}tags[{index}]"
            begin = _text(one if isinstance(one, dict) else {}, "begin", here)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                _refuse(f"{here}.begin", begin, "must begin with one of the triggers")
            rest = self.tag(one, here, depth, cut=len(trigger))
            text = self._rule(f"{ANY_TEXT} {literal(trigger)}", lazy=True)
            behind_text.append(self._rule(f"{text} {rest}"))
            bare.append(self._rule(f"{literal(trigger)} {rest}"))
        first, more = self._rule(one_of(bare)), self._rule(one_of(behind_text))
        must, once = bool(wanted.get("at_least_one")), bool(wanted.get("stop_after_first"))
        if must:  # whoever wants a tag wants it at once: text before it could go on for ever
            return first if once else f"{first} {more}* {ANY_TEXT}"
        return f"({more} | {ANY_TEXT})" if once else f"{more}* {ANY_TEXT}"

    def _tags_with_separator(self, wanted: Mapping[str, Any], where: str, depth: int) -> str:
        tags = _list(wanted, "tags", where)
        separator = literal(_text(wanted, "separator", where))
        one = self._rule(
            one_of(
                self.tag(tag if isinstance(tag, dict) else {}, f"{where}.tags[{index}]", depth) or literal_nothing()
                for index, tag in enumerate(tags)
            )
        )
        several = one if wanted.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if wanted.get("at_least_one") else f"({several})?"


def _boolean_schema(schema: bool, where: str) -> dict[str, Any]:
    if not schema:
        _refuse(f"{where}.json_schema", schema, "must allow something")
    return {}


def _text(wanted: Mapping[str, Any], key: str, where: str) -> str:
    value = wanted.get(key)
    if not isinstance(value, str):
        _refuse(f"{where}.{key}", value, "must be a string")
    return value


def _list(wanted: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = wanted.get(key)
    if not isinstance(value, list) or not value:
        _refuse(f"{where}.{key}" if where else key, value, "must be a list that is not empty")
    return value


def _refuse(where: str, value: object, rule: str) -> NoReturn:
    raise BadConstraint(rule, where=where, value=value)
