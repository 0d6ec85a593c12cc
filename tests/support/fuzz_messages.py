"""Random messages for any protobuf type: well formed ones, mutated ones, and bytes that are none.

Everything comes from a ``random.Random``, so that a seed gives the same messages again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

F = FieldDescriptor
_MAX_DEPTH = 6

_INTEGERS = {
    F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    F.CPPTYPE_UINT32: (0, 2**32 - 1),
    F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    F.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-6, 2.0, 1e9, 1e38, -1e38, math.inf, -math.inf, math.nan, 100.0, 1.5e-45)
# What doors read in strings, one a line, and what breaks such readers.
_NAMES = (
    "a hello scripted no-such-model r1 /etc/passwd ../../x 0 -1 1e400 NaN <|end|> unix:/nowhere 127.0.0.1:1 tcp://*:1"
)
_VERBS = "abort weights kv_cache scheduling generate BYTES BOOL INT32 text_input sampling_parameters stream"
_JSON = r"""
{}
[]
null
[1,2
{"a":
{"type":"object"}
{"type":"json_schema","json_schema":{}}
{"$ref":"#"}
{"type":"string","pattern":"(a{900}){900}"}
{"enum":[]}
{"anyOf":[{"type":"integer"},{"$ref":"#"}]}
{"temperature":1e999,"n":2}
{"seed":-1,"stop":[1]}
[{"role":"user","content":"hi"}]
"""
_GRAMMARS = r"""
[a-z]+
(((((
(a*)*b
a{1000000}
root ::= root
root ::= "a" | "b"
start: /x+/
{% for %}
{{ messages }}
{{ 9**9**9 }}
{% for i in range(10**9) %}x{% endfor %}
"""
_ODD = ("", "\x00", "\u202e", "naïve ✓ 👩‍👩‍👧", "\ud7ff\ue000", "%s%n{0}{{", "\\", "\n\r\t")
_STRINGS = (*_NAMES.split(), *_VERBS.split(), *_JSON.strip().split("\n"), *_GRAMMARS.strip().split("\n"), *_ODD)


def random_message(rng: Random, message: Message, depth: int = 0) -> Message:
    """Fill a message with random fields, some of them many times."""
    some = rng.choice((0.15, 0.4, 0.8)) if depth < 3 else 0.2
    for descriptor in message.DESCRIPTOR.fields:
        oneof = descriptor.containing_oneof
        if oneof is not None and len(oneof.fields) > 1:
            continue
        if rng.random() < some:
            set_field(rng, message, descriptor, depth)
    for oneof in message.DESCRIPTOR.oneofs:
        if len(oneof.fields) > 1 and rng.random() < 0.85:
            set_field(rng, message, rng.choice(oneof.fields), depth)
    return message


def set_field(rng: Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    """Give a field another random value."""
    if depth > _MAX_DEPTH:
        return
    message.ClearField(field.name)
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(rng, value, field, depth)
    elif field.is_repeated:
        count = rng.choice((0, 1, 1, 2, 3, 17, 300)) if depth < 3 else rng.choice((0, 1, 2))
        for _ in range(count):
            if field.message_type is not None:
                random_message(rng, value.add(), depth + (1 if count < 17 else 4))
            else:
                value.append(random_scalar(rng, field))
    elif field.message_type is not None:
        value.SetInParent()
        random_message(rng, value, depth + 1)
    else:
        setattr(message, field.name, random_scalar(rng, field))


def _fill_map(rng: Random, container: Any, field: FieldDescriptor, depth: int) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    for _ in range(rng.choice((0, 1, 2, 40))):
        if value.message_type is not None:
            random_message(rng, container[random_scalar(rng, key)], depth + 1)
        else:
            container[random_scalar(rng, key)] = random_scalar(rng, value)


def random_scalar(rng: Random, field: FieldDescriptor) -> Any:
    """Return a value that the type can hold, likely an extreme one."""
    kind = field.cpp_type
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        near = (0, 1, 2, 3, 7, 16, 64, 128, 255, 256, 259, 260, 1000, 4096, -1, low, low + 1, high - 1, high)
        value = rng.choice(near) if rng.random() < 0.8 else rng.randint(low, high)
        return min(max(value, low), high)
    if kind == F.CPPTYPE_FLOAT:
        value = rng.choice(_FLOATS)
        return value if not math.isfinite(value) or abs(value) <= 3e38 else 1.0
    if kind == F.CPPTYPE_DOUBLE:
        return rng.choice((*_FLOATS, 1e308, -1e308, 5e-324))
    if kind == F.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == F.CPPTYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return rng.choice(known) if rng.random() < 0.85 else rng.choice((-1, 99, 2**31 - 1, -(2**31)))
    if kind == F.CPPTYPE_STRING and field.type == F.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 4, 16, 16, 1000)))
    return random_text(rng)


def random_text(rng: Random) -> str:
    """Return text of any kind, now and then a long one."""
    draw = rng.random()
    if draw < 0.75:
        return rng.choice(_STRINGS)
    if draw < 0.8:
        return rng.choice(("x", "é", "{", "[", " ")) * rng.choice((129, 3000, 70_000))
    return "".join(chr(rng.choice((rng.randint(1, 127), rng.randint(0xA0, 0x2FFF)))) for _ in range(rng.randint(1, 40)))


def mutated_fields(rng: Random, message: Message) -> Message:
    """Change some fields of a message, at any depth, and keep the rest."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        place, depth = message, 0
        while True:
            field = rng.choice(place.DESCRIPTOR.fields) if place.DESCRIPTOR.fields else None
            if field is None:
                break
            # Deeper into a message that is there, more often than not: that is where the checks are.
            is_there = field.message_type is not None and not field.is_repeated and place.HasField(field.name)
            if is_there and rng.random() < 0.8:
                place, depth = getattr(place, field.name), depth + 1
                continue
            if rng.random() < 0.15:
                place.ClearField(field.name)
            else:
                set_field(rng, place, field, depth)
            break
    return message


def broken_bytes(rng: Random, wire: bytes) -> bytes:
    """Return bytes near a message that are most likely none."""
    broken = bytearray(wire)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randint(0, len(broken))
        match rng.randrange(5):
            case 0:
                del broken[place:]  # truncated
            case 1 if broken:
                broken[place % len(broken)] ^= 1 << rng.randrange(8)
            case 2:
                broken[place:place] = rng.randbytes(rng.choice((1, 2, 9)))
            case 3:
                broken[place:place] = broken[: rng.randint(0, 40)]  # a field twice, or a field inside another
            case _:
                broken[place:place] = rng.choice((b"\xff" * 11, b"\x0b" * 200, b"\x0a\xff\xff\xff\xff\x0f", b"\x00"))
    return bytes(broken)


class MessageSource:
    """Wire forms for one type of message: random, mutated from good ones, broken, and good."""

    def __init__(self, new: Callable[[], Message], good: Iterable[Callable[[Random], Message]] = ()) -> None:
        self._new = new
        self._good: Sequence[Callable[[Random], Message]] = list(good)

    def draw(self, rng: Random) -> bytes:
        draw = rng.random()
        if not self._good and draw < 0.5:
            draw += 0.5
        if draw < 0.1:
            return self._of(rng).SerializeToString()
        if draw < 0.4:
            return mutated_fields(rng, self._of(rng)).SerializeToString()
        if draw < 0.5:
            return broken_bytes(rng, self._of(rng).SerializeToString())
        if draw < 0.85:
            return random_message(rng, self._new()).SerializeToString()
        if draw < 0.97:
            return broken_bytes(rng, random_message(rng, self._new()).SerializeToString())
        return rng.randbytes(rng.choice((0, 1, 5, 100, 5000)))

    def shown(self, wire: bytes) -> str:
        """What a wire form says, for people; its bytes where it says nothing."""
        message = self._new()
        try:
            message.ParseFromString(wire)
        except DecodeError:
            return f"{len(wire)} bytes that are no message: {wire[:300].hex()}"
        return " ".join(str(message).split())[:1500]

    def _of(self, rng: Random) -> Message:
        message = self._new()
        message.CopyFrom(rng.choice(self._good)(rng))
        return message
