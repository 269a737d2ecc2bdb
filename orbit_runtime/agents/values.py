"""Values of items as JSON with an exact round trip, including NaN, infinities and tuples, in valid files."""

from __future__ import annotations

import math
from typing import Any

from orbit_runtime.errors import DataError

FLOAT, TUPLE, OBJECT = "$float", "$tuple", "$object"
"""A mapping with one of these as its only key encodes a value that JSON lacks; OBJECT escapes a mapping that looks like
one."""
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any, where: str) -> Any:
    """`value` in JSON's types. Raises DataError, with the path, if it contains anything unsupported."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        return {TUPLE: [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]}
    if isinstance(value, list):
        return [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None or None in value:
            raise DataError(f"the key {strange!r} is not text", where=where, fix="use texts as keys")
        content = {key: encode(each, f"{where}.{key}") for key, each in value.items()}
        return {OBJECT: content} if len(value) == 1 and next(iter(value)) in (FLOAT, TUPLE, OBJECT) else content
    raise DataError(
        f"a {type(value).__name__} cannot be written",
        where=where,
        fix="make it text, a number, a boolean, None, a list, a tuple or a dict",
    )


def decode(value: Any) -> Any:
    """The value that was given to `encode`."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key == FLOAT and content in _FLOATS:
            return _FLOATS[content]
        if key == TUPLE and isinstance(content, list):
            return tuple(decode(each) for each in content)
        if key == OBJECT and isinstance(content, dict):
            return {name: decode(each) for name, each in content.items()}
    return {key: decode(each) for key, each in value.items()}
