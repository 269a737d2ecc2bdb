"""The JSON schema of a Python function, in the form that chat templates and common APIs describe tools.

Belongs here: signature and docstring → schema. Does not belong here: calling the function (`environment_cell`).
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples):", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


def tool_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Schema of a function with annotated parameters, described by its docstring (Google style).

    Example: `def add(a: int, b: int = 0)` has the properties `a` and `b`, both integers, and `a` is required.
    """
    text = inspect.getdoc(function) or ""
    described = _described_arguments(text)
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # names that only a type checker knows
        hints = {}
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        about = {"description": described[parameter.name]} if parameter.name in described else {}
        properties[parameter.name] = {**_type_schema(hints.get(parameter.name)), **about}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join(_SECTION.split(text)[0].split())
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _type_schema(hint: Any) -> dict[str, Any]:
    """Schema of one annotation; an unknown one leaves the type open."""
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        given = [each for each in arguments if each is not type(None)]
        return _type_schema(given[0]) if len(given) == 1 else {"anyOf": [_type_schema(each) for each in given]}
    if origin in (list, tuple, set):
        return {"type": "array", **({"items": _type_schema(arguments[0])} if arguments else {})}
    return {"type": "object"} if origin is dict else {}


def _described_arguments(text: str) -> dict[str, str]:
    parts = re.split(r"^(?:Args|Arguments):\s*$", text, maxsplit=1, flags=re.MULTILINE)
    if len(parts) < 2:
        return {}
    lines = _SECTION.split(parts[1])[0].splitlines()
    return {found[1]: found[2].strip() for line in lines if (found := _ARGUMENT.match(line))}
