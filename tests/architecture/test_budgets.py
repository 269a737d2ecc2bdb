"""Sizes of a file, a function or a class that keep it readable. An exception is listed with its reason; one that is no
longer needed fails too. What the whole is made of: `ratchets`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.ratchets import PRODUCT_FOLDERS, name_of, python_files, source, tree

OTHER_FOLDERS = ("tests", "tools", "benchmarks")

FILE_LINES = 800
FUNCTION_LINES = 80
LOOP_FUNCTION_LINES = 120
PARAMETERS = 8
SPEC_CLASS_FIELDS = 20

LONG_FILES: dict[str, str] = {}
"""Path: why it is longer than `FILE_LINES`."""
LONG_FUNCTIONS: dict[str, str] = {}
"""`path:Class.function`: why it is longer than its budget."""
MANY_PARAMETERS: dict[str, str] = {
    "orbit_runtime/cli/evaluate.py:evaluate": "a command's options: which models, and of each kind of model its own",
    "orbit_runtime/cli/serve.py:serve": "a command's options: what is served, and to whom",
    "orbit_runtime/sglang_plugin/rotation_kernel.py:rotation_kernel": "a Triton kernel: tile sizes and switches",
    "orbit_runtime/cli/chat.py:chat": "a command's options: which models, which engine, and how it samples",
    "orbit_runtime/cli/data.py:prepare": "a command's options: which columns, what is made of them, what is left out",
    "orbit_runtime/environments/rewards/judge.py:judge": "the arguments of a reward are those of its manifest",
    "orbit_runtime/policy/load.py:load_policy": "the door of a package: one keyword for each decision of a manifest",
    "orbit_runtime/quant/kernels/matmul.py:forward_kernel": "a Triton kernel, likewise",
    "orbit_runtime/quant/kernels/matmul.py:input_gradient_kernel": "a Triton kernel, likewise",
}
"""`path:Class.function`: why it takes more than `PARAMETERS`."""
MANY_FIELDS = {"orbit_runtime/spec/status.py:RunStatus": "flat, because columns and `kubectl wait` read it by path"}
"""`path:Class`: why it has more than `SPEC_CLASS_FIELDS`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def num_lines(path: Path) -> int:
    return len(source(path).splitlines())


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below `node` with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


@functools.cache
def all_functions(*folders: str) -> list[tuple[str, int, int]]:
    """Name, lines and parameters of each."""
    return [
        (f"{name_of(path)}:{name}", function_lines(function), num_parameters(function))
        for path in python_files(*folders)
        for name, function in functions(tree(path))
    ]


def function_lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def num_parameters(function: Function) -> int:
    arguments = function.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def check_budget(found: dict[str, str], exceptions: dict[str, str]) -> None:
    over = [f"{name}: {size}" for name, size in found.items() if name not in exceptions]
    assert not over, "over budget:\n" + "\n".join(over)
    unneeded = sorted(set(exceptions) - set(found))
    assert not unneeded, f"listed as exceptions, and within the budget: {unneeded}"


def test_no_file_is_longer_than_its_budget() -> None:
    lengths = {name_of(path): num_lines(path) for path in python_files(*PRODUCT_FOLDERS, *OTHER_FOLDERS)}
    found = {name: f"{length} lines of {FILE_LINES}" for name, length in lengths.items() if length > FILE_LINES}
    check_budget(found, LONG_FILES)


def test_no_function_is_longer_than_its_budget() -> None:
    found = {}
    for name, lines, _ in all_functions(*PRODUCT_FOLDERS, *OTHER_FOLDERS):
        budget = LOOP_FUNCTION_LINES if name.startswith("orbit_runtime/loop/") else FUNCTION_LINES
        if lines > budget:
            found[name] = f"{lines} lines of {budget}"
    check_budget(found, LONG_FUNCTIONS)


def test_no_function_takes_more_parameters_than_its_budget() -> None:
    found = {
        name: f"{parameters} parameters of {PARAMETERS}"
        for name, _, parameters in all_functions(*PRODUCT_FOLDERS, *OTHER_FOLDERS)
        if parameters > PARAMETERS
    }
    check_budget(found, MANY_PARAMETERS)


def test_no_spec_class_has_more_fields_than_its_budget() -> None:
    found = {}
    for path in python_files("orbit_runtime/spec"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                fields = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
                if fields > SPEC_CLASS_FIELDS:
                    found[f"{name_of(path)}:{node.name}"] = f"{fields} fields of {SPEC_CLASS_FIELDS}"
    check_budget(found, MANY_FIELDS)


def test_no_module_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "misc", "common"}
    named = [path for path in python_files(*PRODUCT_FOLDERS, *OTHER_FOLDERS) if {path.stem, path.parent.name} & vague]
    assert not named, f"a name that says nothing about the contents: {[name_of(path) for path in named]}"


@pytest.mark.parametrize(
    ("source", "lines", "parameters"),
    [
        ("def short(a, *, b):\n    return a", 2, 2),
        ("class Thing:\n    async def method(self, a, /, b, *rest, c, **more):\n        pass", 2, 3),
        ("if True:\n    def nested():\n        return 1", 2, 0),
    ],
)
def test_the_counting_itself(source: str, lines: int, parameters: int) -> None:
    ((_, function),) = functions(ast.parse(source))
    assert (function_lines(function), num_parameters(function)) == (lines, parameters)
