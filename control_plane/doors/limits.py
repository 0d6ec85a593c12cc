"""Check single values of requests. Each function raises ``InvalidParameter`` naming field, value and rule."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from ctypes import c_float
from typing import Any

from service_chassis.errors import InvalidParameter

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_BYTES = 256
MAX_CURSORS = 1024
# Tokenize serves text that no prompt of this model could hold, within reason.
MAX_TOKENIZE_CHARS = 1 << 20
# Detokenize serves so many times the context.
MAX_DETOKENIZE_CONTEXTS = 64
# A request that nobody listens to holds memory that others wait for.
MAX_DETACH_GRACE_S = 3600.0


def check_request_id(request_id: str) -> None:
    """Ids travel in logs, headers and metadata: visible ASCII, not too long."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        rule = f"must have 1 to {MAX_REQUEST_ID_CHARS} characters"
        raise InvalidParameter("request_id", request_id, rule)
    if not all("!" <= character <= "~" for character in request_id):
        raise InvalidParameter("request_id", request_id, "must be visible ASCII without spaces")


def check_number(field: str, value: float, low: float, high: float = math.inf, *, above_low: bool = False) -> float:
    """Return ``value`` if it is finite and in [low, high], or in (low, high]. NaN is in no range."""
    # Clients send 32 bits: a bound itself must be inside, however it was rounded on the way.
    least, most = min(low, c_float(low).value), max(high, c_float(high).value)
    inside = (low < value if above_low else least <= value) and value <= most
    if not (inside and math.isfinite(value)):
        if high == math.inf:
            rule = f"must be finite and {'above' if above_low else 'at least'} {low:g}"
        else:
            rule = f"must be in {'(' if above_low else '['}{low:g}, {high:g}]"
        # As the client gave it: without the digits that 32 bits add, and whole where it is.
        shown = float(f"{value:.6g}")
        raise InvalidParameter(field, int(shown) if shown.is_integer() else shown, rule)
    return value


def check_count(field: str, values: Sequence[object], most: int) -> None:
    """Check the length of a list."""
    if len(values) > most:
        raise InvalidParameter(field, f"{len(values)} entries", f"may have at most {most}")


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that ids are inside the vocabulary."""
    ids = list(token_ids)
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return  # without a loop in Python: there may be a million
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameter(field, token_id, f"must be inside the vocabulary, [0, {vocab_size})")


def parse_json(field: str, text: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """Return the JSON value of a field that holds a list or an object; None where the field is empty."""
    if not text:
        return None
    name = "list" if kind is list else "object"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(field, text, f"must be a JSON {name} ({error})") from None
    if not isinstance(value, kind):
        raise InvalidParameter(field, text, f"must be a JSON {name}")
    if "\\u" in text and not _is_unicode(value):
        raise InvalidParameter(field, text, f"must be a JSON {name} of Unicode text: \\ud800 to \\udfff come in pairs")
    return value


def _is_unicode(value: Any) -> bool:
    """Whether every text in a JSON value can be written down: JSON can say halves of characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
