"""Read sampling parameters that come as JSON under vLLM's names, for doors whose contract has no types for them.

Our own parameters carry those names, so the proto says which there are and of what type. Clients of such contracts send
numbers as text often enough ("0.7") that text which is a number counts as one. Ranges are checked where all doors
check them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from maniple.v1.sampling_pb2 import SamplingParams, StructuredOutput
from service_chassis.errors import InvalidParameter

_FIELDS = {
    field.name: field
    for field in SamplingParams.DESCRIPTOR.fields
    if field.name not in ("structured_output", "logprobs_mode")
}
# A constraint of the output goes under either name there, as an object with one key.
_CONSTRAINTS = ("structured_outputs", "guided_decoding")
KNOWN_NAMES = (*sorted(_FIELDS), *_CONSTRAINTS)
_WHOLE = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_LARGEST_FLOAT = 3.4e38


def read_sampling(where: str, values: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that ``values`` sets. Null leaves a parameter unset.

    Raises:
        InvalidParameter: a name is unknown, or a value is of another type; ``where`` goes before the name.
    """
    params = SamplingParams()
    for name, value in values.items():
        field_name = f"{where}{name}"
        if name in _CONSTRAINTS:
            if value is not None:
                _read_constraint(field_name, value, params.structured_output)
        elif name not in _FIELDS:
            raise InvalidParameter(field_name, value, f"is no sampling parameter; there are {', '.join(KNOWN_NAMES)}")
        elif value is not None:
            _set(field_name, value, params, _FIELDS[name])
    return params


def _set(where: str, value: Any, params: SamplingParams, field: FieldDescriptor) -> None:
    if field.name == "logit_bias":
        for token_id, bias in _of_type(where, value, dict, "an object of token ids and numbers").items():
            params.logit_bias[_whole(where, token_id, 0, 2**32 - 1)] = _number(where, bias)
        return
    if field.name == "seed":
        params.seed = _whole(where, value, -(2**63), 2**64 - 1) % 2**64  # signed there, unsigned here
        return
    if field.name == "top_k":
        params.top_k = _whole(where, value, -(2**31), 2**31 - 1)
        return
    read = _reader(where, field)
    if field.is_repeated:
        one = isinstance(value, str) and field.name == "stop"
        getattr(params, field.name).extend(read(each) for each in ([value] if one else _of_type(where, value, list)))
    else:
        setattr(params, field.name, read(value))


def _reader(where: str, field: FieldDescriptor) -> Callable[[Any], Any]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return lambda value: _of_type(where, value, str, "text")
    if field.type == FieldDescriptor.TYPE_BOOL:
        return lambda value: _switch(where, value)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return lambda value: _number(where, value)
    low, high = _WHOLE[field.type]
    return lambda value: _whole(where, value, low, high)


def _switch(where: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return bool(_of_type(where, value, bool, "true or false"))


def _number(where: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise InvalidParameter(where, value, "must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(where, value, "must be a number")
    if not abs(value) <= _LARGEST_FLOAT:  # NaN, infinities, and what no float holds
        raise InvalidParameter(where, value, "must be a finite number")
    return float(value)


def _whole(where: str, value: Any, low: int, high: int) -> int:
    rule = f"must be a whole number in [{low}, {high}]"
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise InvalidParameter(where, value, rule) from None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(where, value, rule)
    return value


def _of_type(where: str, value: Any, kind: type[Any], what: str = "a list") -> Any:
    if not isinstance(value, kind):
        raise InvalidParameter(where, value, f"must be {what}")
    return value


def _read_constraint(where: str, value: Any, constraint: StructuredOutput) -> None:
    kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    given = {k: v for k, v in _of_type(where, value, dict, "an object").items() if v is not None and v is not False}
    if len(given) != 1 or next(iter(given)) not in kinds:
        raise InvalidParameter(where, value, f"must be an object with one of {', '.join(kinds)}")
    ((kind, what),) = given.items()
    if kind == "json":
        constraint.json_schema = what if isinstance(what, str) else json.dumps(what)
    elif kind == "json_object":
        constraint.json_object = _switch(where, what)
    elif kind == "choice":
        options = _of_type(where, what, list)
        constraint.choice.options.extend(_of_type(where, option, str, "a list of texts") for option in options)
    elif kind == "structural_tag":
        constraint.structural_tag = what if isinstance(what, str) else json.dumps(what)
    else:
        setattr(constraint, kind, _of_type(where, what, str, "text"))
