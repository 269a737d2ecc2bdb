"""The part of CEL, the language of the API server's rules, that ours are written in, as Python functions.

Any other form is an error when the rule is imported. Example: `has(self.topK) && self.topK > 64`.
"""

from __future__ import annotations

import ast
import ipaddress
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from pydantic.alias_generators import to_snake

Value = Callable[[Mapping[str, Any]], Any]
"""An expression, as a function of its variables."""

_VARIABLES = ("self", "key", "h", "o", "r")
"""`self` is the block; the others are items of its lists and keys of its mappings."""
_PATH = r"[A-Za-z]\w*(?:\.[A-Za-z]\w*)*(?![\w(])"
_TOKEN = re.compile(
    rf"\s*('(?:[^'\\]|\\.)*'|\[[^]]*\]|\d[\d.]*(?:e-\d+)?|\.?[A-Za-z]\w*\(|{_PATH}|\|\||&&|[=!<>]=|[!<>%?:,()])"
)


def compile_cel(text: str) -> Value:
    """The expression as a Python function of its variables.

    Raises:
        ValueError: it has a form that is not known here.
    """
    left = _TOKEN.findall(text)[::-1]
    try:
        value = _expression(left)
    except (LookupError, SyntaxError, ValueError):
        left.append("")
    if left or _TOKEN.sub("", text).strip():
        raise ValueError(f"a form of CEL that no rule may have, before {left[::-1]}: {text}")
    return value


def fields_of(text: str) -> list[str]:
    """The fields of `self` that an expression reads, as the manifest spells them."""
    return [token.removeprefix("self.") for token in _TOKEN.findall(text) if re.fullmatch(rf"self\.{_PATH}", token)]


def is_network(text: str) -> bool:
    """CEL's `isCIDR`, which accepts no IPv4 address that is written as an IPv6 one."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return not (network.version == 6 and network.network_address.ipv4_mapped is not None)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """RE2's `$` is the very end, and its classes are ASCII."""
    return re.compile(text.replace("$", r"\Z"), re.ASCII)


def _of_both(function: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    return lambda left, right: lambda scope: function(left(scope), right(scope))


_OPERATORS: Mapping[str, tuple[int, Callable[[Value, Value], Value]]] = {
    "||": (1, lambda left, right: lambda scope: left(scope) or right(scope)),
    "&&": (2, lambda left, right: lambda scope: left(scope) and right(scope)),
    "==": (3, _of_both(operator.eq)),
    "!=": (3, _of_both(operator.ne)),
    "<": (3, _of_both(operator.lt)),
    "<=": (3, _of_both(operator.le)),
    ">": (3, _of_both(operator.gt)),
    ">=": (3, _of_both(operator.ge)),
    "in": (3, _of_both(lambda item, items: item in items)),
    "%": (4, _of_both(operator.mod)),
}
"""Operator → its precedence and its function."""
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "has(": lambda value: value is not None,
    "size(": len,
    "isCIDR(": is_network,
}
_METHODS: Mapping[str, Callable[..., Any]] = {
    ".contains(": operator.contains,
    ".startsWith(": str.startswith,
    ".endsWith(": str.endswith,
    ".lowerAscii(": str.lower,
    ".matches(": lambda text, pattern: _pattern(pattern).search(text) is not None,
}
_MACROS: Mapping[str, Callable[[Iterable[bool]], bool]] = {
    ".all(": all,
    ".exists(": any,
    ".exists_one(": lambda answers: sum(answers) == 1,
}


def _expression(left: list[str], least: int = 0) -> Value:
    """Reads what operators that bind more strongly than `least` join. `left`: the unread tokens, the next one last."""
    value = _operand(left)
    while left and left[-1] in _OPERATORS and _OPERATORS[left[-1]][0] > least:
        strength, joined = _OPERATORS[left.pop()]
        value = joined(value, _expression(left, strength))
    if least or left[-1:] != ["?"]:
        return value
    left.pop()
    chosen = _expression(left)
    _need(":", left)
    other = _expression(left)
    return lambda scope: chosen(scope) if value(scope) else other(scope)


def _operand(left: list[str]) -> Value:
    token = left.pop()
    if token == "!":
        denied = _operand(left)
        return lambda scope: not denied(scope)
    value = _closed(left) if token == "(" else _primary(token, left)
    while left and left[-1].startswith("."):
        value = _method(value, left.pop(), left)
    return value


def _primary(token: str, left: list[str]) -> Value:
    if token in _FUNCTIONS:
        function, argument = _FUNCTIONS[token], _closed(left)
        return lambda scope: function(argument(scope))
    if not re.fullmatch(_PATH, token):
        constant = ast.literal_eval(token)
        return lambda _: constant
    variable, _, path = token.partition(".")
    if variable not in _VARIABLES:
        raise ValueError
    if not path:
        return lambda scope: scope[variable]
    read = attrgetter(".".join(map(to_snake, path.split("."))))
    return lambda scope: read(scope[variable])


def _method(value: Value, name: str, left: list[str]) -> Value:
    if name in _MACROS:
        joined, variable = _MACROS[name], left.pop()
        _need(",", left)
        inside = _closed(left)
        return lambda scope: joined(inside({**scope, variable: item}) for item in value(scope))
    method, arguments = _METHODS[name], [ast.literal_eval(left.pop())] if left[-1] != ")" else []
    _need(")", left)
    return lambda scope: method(value(scope), *arguments)


def _closed(left: list[str]) -> Value:
    """An expression, and the parenthesis after it."""
    value = _expression(left)
    _need(")", left)
    return value


def _need(token: str, left: list[str]) -> None:
    if left.pop() != token:
        raise ValueError
