"""Arithmetic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

MAX_DIGITS = 300
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: numbers, + - * / // % and parentheses, such as (12+34)*5.
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float:
    """Evaluates numbers and operators only: names, calls and powers are refused."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and len(repr(node.value)) <= MAX_DIGITS:
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        if isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS:
            raise ValueError("the result is too large")
        return value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / // % and parentheses")
