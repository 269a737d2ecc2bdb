"""What the code is made of, counted, and the ceiling of each number.

A ceiling is lowered by whoever gets below it. It rises only in a commit that names the feature, and the sentence beside
it says what was deleted for that feature. `python -m tests.architecture.ratchets` prints today's numbers beside their
ceilings, `--trace` also those of a traced step.

Belongs here: the table, and one reading of the sources that all counts share. Does not belong here: limits of a single
file, function or class (`test_budgets`).
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import subprocess
import sys
import tempfile
import typing
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT_FOLDERS = ("orbit_runtime", "operator")
FRAGMENT_LINES = 100
EXCEPTED = (
    "orbit_runtime/cli/",
    "orbit_runtime/quant/",
    "orbit_runtime/model_info/calls/",
    "orbit_runtime/model_info/families/",
    "orbit_runtime/policy/",
    "operator/orbit_operator/policies/",
)
"""Folders whose short modules are no fragments: each holds a command, a format or a policy."""


class Ceiling(NamedTuple):
    highest: int
    raised: str = ""
    """Why it is higher than it was before: the feature, and what was deleted for it."""


CEILINGS: dict[str, Ceiling] = {
    "statements": Ceiling(
        48_889,
        "fp32 products on a CPU by a kernel of Orbit's own, LoRA and its gradients in them, equal bits of models with "
        "experts (the kernel's own way for few columns, buckets of passes that need none, a cache's writes of one "
        "position and one joined output go); norms, rotations, gates, log-probs, draws and LoRA on a CPU by kernels of "
        "Orbit's own (gradients by torch's operations and draws in parts go); attention and BF16 products of a CPU by "
        "such kernels (rules by which torch's kept bits go: blocks of keys, plain products of first queries, gradients "
        "of attention, a wide head); "
        "state spaces of Mamba 2 packed, with a prompt computed once; equal bits in FP32 too "
        "(torch's switch of precision goes, and what stood twice in the command line and two families). "
        "BF16 on processors that multiply it: one decoder for trainer and engine with its own gradients, weights "
        "ordered once, equal bits, codecs into the product's dtype (the transposed product goes), queues for several "
        "nodes. "
        "records of types, and models beside a vision tower; usual targets of unknown types go. Damaged files, rows "
        "and folders are told, one guard and one server for all ports (three servers and two guards go), pods of "
        "clusters with rules of their own, what keeps any pod from starting; the best adapter is kept and named; plans "
        "count SGLang's graphs and copies, doctor knows GPUs; the extra for Transformer Engine goes. "
        "The code of a run is kept and compared, stopWhen (patience's own code goes), orbit try; what clusters ask of "
        "pods is one mapping, ranks are placed first; code of a user's gets named variables (a second way to end what "
        "it starts goes); layers add in fp32 where they multiply in BF16. Rates, minutes and batches that fit are "
        "decided and told; drift, one answer by its tokens, answers of demonstrations; the best at every door; answers "
        "of a user's code are marked; sequences are scored together at start; no weight is cast twice on a CPU",
    ),
    "functions": Ceiling(
        5_872,
        "products of fp32 and of rows by expert; kernels for CPUs, of each step with its gradient; state spaces "
        "packed; numbers of rows with equal bits; making and reading a type's record; a check for each kind of damaged "
        "input; limits of one connection; finding and comparing a run's code; why a run ends early; what a pod "
        "may be given; decisions of the first start, drift, marks of answers",
    ),
    "files": Ceiling(
        515,
        "kernels for CPUs: compiling, products, attention; gradients of the decoder's steps; "
        "a type's record: one makes it, one reads it without torch; the package of ports: two of serve's went; the "
        "code of a run; orbit try",
    ),
    "files of adapters": Ceiling(18),
    "files of agents": Ceiling(10),
    "files of algorithms": Ceiling(10),
    "files of api": Ceiling(7),
    "files of checkpoints": Ceiling(13),
    "files of cli": Ceiling(28, "orbit try"),
    "files of data": Ceiling(19),
    "files of environments": Ceiling(18),
    "files of evaluation": Ceiling(10),
    "files of loop": Ceiling(24, "the code of a run"),
    "files of model_info": Ceiling(31, "records of types without a row"),
    "files of observability": Ceiling(20),
    "files of parity": Ceiling(6),
    "files of planner": Ceiling(16),
    "files of policy": Ceiling(
        32,
        "the CPU's attention; gradients of the decoder's steps; "
        "the probe of a model before it is loaded: its wrong numbers are refused; families without a row, and records",
    ),
    "files of ports": Ceiling(3, "the guard and the server that serve, observability and agents had apart"),
    "files of quant": Ceiling(29, "kernels for CPUs: compiling them, products"),
    "files of rollout": Ceiling(21),
    "files of serve": Ceiling(14),
    "files of services": Ceiling(12),
    "files of sglang_plugin": Ceiling(16),
    "files of sides": Ceiling(9, "what `loop` held of trainer and engine, and what each needs to be opened"),
    "files of spec": Ceiling(25),
    "files of storage": Ceiling(13),
    "files of the top": Ceiling(
        8,
        "the version has a module of its own: who read it imported the package, and with it the API and the loop",
    ),
    "files of training": Ceiling(21),
    "files of workers": Ceiling(32),
    "files of the operator": Ceiling(50),
    "fragments": Ceiling(
        3,
        "the guard of ranks, a program: what guards of all children share is in `child` now; the operator's queue, a "
        "structure of its own, has lost a call that nothing made",
    ),
    "modules in an import cycle": Ceiling(0),
    "class names with more than one meaning": Ceiling(15),
    "manifest fields": Ceiling(
        261,
        "data.chat.keepTokens; checkpoint.keepBest: which evaluation chooses, by what, and how many; acceptCode; "
        "training.stopWhen; environment.variables; placement.pod; lifecycle.waitingDeadlineSeconds",
    ),
    "frames from the loop to the loss": Ceiling(5),
    "files that a step enters": Ceiling(103),
}

Modules = Mapping[str, ast.Module]
"""Syntax tree of each module, by dotted name; a package ends in `.__init__`."""


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "golden" not in path.parts)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path), filename=str(path))


def num_statements(parsed: ast.AST) -> int:
    """Statements without docstrings, a field's own included."""
    statements = (node for node in ast.walk(parsed) if isinstance(node, ast.stmt))
    return sum(not _is_docstring(statement) for statement in statements)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def num_functions(parsed: ast.AST) -> int:
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(parsed))


def repeated_classes(parsed: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public class names that more than one module defines, each with these modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, body in parsed.items():
        for node in body.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return {name: found for name, found in homes.items() if len(found) > 1}


def imports(parsed: Modules) -> dict[str, set[str]]:
    """Modules that each module imports, as written: inside functions and under `TYPE_CHECKING` too.

    `from package.module import name` is an import of that module, not of the package above it.
    """
    known = {name.removesuffix(".__init__"): name for name in parsed}
    edges = {}
    for name, body in parsed.items():
        found = {known[target] for target in _imported(body, known) if target in known}
        edges[name] = found - {name}
    return edges


def _imported(body: ast.Module, known: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def cycles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other."""
    reached = {name: _reached(name, edges) for name in edges}
    groups: list[set[str]] = []
    for name in sorted(edges):
        group = {other for other in reached[name] if name in reached[other]}
        if group and not any(name in each for each in groups):
            groups.append(group)
    return groups


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(edges[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += edges[name]
    return found


def fragments(edges: Mapping[str, set[str]], lines: Mapping[str, int], excepted: tuple[str, ...] = ()) -> list[str]:
    """Short modules whose only importer is in the same package. Dotted prefixes in `excepted` are left out.

    A package is a folder of orbit_runtime, with the folders below it; the operator's folders are one each.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in edges.items():
        for target in targets:
            importers[target].add(name)
    return sorted(
        name
        for name, found in importers.items()
        if len(found) == 1
        and lines[name] < FRAGMENT_LINES
        and not name.endswith("__init__")
        and not name.startswith(excepted)
        and _package(name) == _package(*found)
    )


def _package(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] == "orbit_runtime" else parts[:-1])


def module_of(path: Path) -> str:
    return name_of(path).removeprefix("operator/").removesuffix(".py").replace("/", ".")


@functools.cache
def product() -> dict[str, ast.Module]:
    return {module_of(path): tree(path) for path in python_files(*PRODUCT_FOLDERS)}


@functools.cache
def product_imports() -> dict[str, set[str]]:
    return imports(product())


def product_fragments() -> list[str]:
    lines = {module_of(path): len(source(path).splitlines()) for path in python_files(*PRODUCT_FOLDERS)}
    excepted = tuple(folder.removeprefix("operator/").replace("/", ".") for folder in EXCEPTED)
    return fragments(product_imports(), lines, excepted)


def manifest_fields() -> set[str]:
    """Paths of the manifest that hold a value, not a block."""
    from orbit_runtime.spec import OrbitRun

    return set(_value_paths(OrbitRun, ""))


def _value_paths(block: type, prefix: str) -> Iterator[str]:
    for name, field in block.model_fields.items():  # type: ignore[attr-defined]
        blocks = list(_blocks(field.annotation))
        if not blocks:
            yield prefix + name
        for inner in blocks:
            yield from _value_paths(inner, f"{prefix}{name}.")


def _blocks(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _blocks(inner)


def counted() -> dict[str, int]:
    """All numbers that need no run."""
    parsed = product()
    files = Counter(name.split(".")[1] if name.count(".") > 1 else "the top" for name in parsed if _is_runtime(name))
    sides = [{name: parsed[name] for name in parsed if _is_runtime(name) is side} for side in (True, False)]
    return {
        "statements": sum(map(num_statements, parsed.values())),
        "functions": sum(map(num_functions, parsed.values())),
        "files": len(parsed),
        **{f"files of {package}": number for package, number in sorted(files.items())},
        "files of the operator": sum(not _is_runtime(name) for name in parsed),
        "fragments": len(product_fragments()),
        "modules in an import cycle": sum(map(len, cycles(product_imports()))),
        "class names with more than one meaning": sum(len(repeated_classes(side)) for side in sides),
        "manifest fields": len(manifest_fields()),
    }


def _is_runtime(module: str) -> bool:
    return module.startswith("orbit_runtime")


def traced() -> dict[str, int]:
    """Frames and files of a step of the quickstart, as `traced_step` finds them."""
    facts = trace()
    return {"frames from the loop to the loss": len(facts["frames"]), "files that a step enters": len(facts["files"])}


@functools.cache
def trace() -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.architecture.traced_step", folder]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        result = Path(folder, "trace.json")
        assert result.is_file(), ended.stdout + ended.stderr
        return typing.cast(dict[str, list[str]], json.loads(result.read_text(encoding="utf-8")))


def above(numbers: Mapping[str, int], ceilings: Mapping[str, Ceiling] | None = None) -> list[str]:
    """What has grown, or has no ceiling yet."""
    known = CEILINGS if ceilings is None else ceilings
    return [
        f"{name}: {number}, and its ceiling is {known[name].highest if name in known else 'missing'}"
        for name, number in numbers.items()
        if name not in known or number > known[name].highest
    ]


def table(numbers: Mapping[str, int]) -> str:
    rows = [f"{'':42} {'today':>7} {'ceiling':>8}"]
    for name, number in numbers.items():
        ceiling = CEILINGS.get(name, Ceiling(0, "has no ceiling yet"))
        below = "  lower it" if number < ceiling.highest else ""
        rows.append(f"{name:42} {number:7,} {ceiling.highest:8,}{below}  {ceiling.raised}".rstrip())
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints what the code is made of, and the ceiling of each number.")
    parser.add_argument("--trace", action="store_true", help="also trace a step of the quickstart")
    parser.add_argument("--names", action="store_true", help="name the fragments, the cycles and the repeated classes")
    asked = parser.parse_args()
    print(table(counted() | (traced() if asked.trace else {})))
    if asked.names:
        print("\nfragments:", *product_fragments(), sep="\n  ")
        print("\nimport cycles:", *(" ".join(sorted(each)) for each in cycles(product_imports())), sep="\n  ")
        repeated = repeated_classes(product())
        print("\nclass names:", *(f"{name}: {' '.join(repeated[name])}" for name in sorted(repeated)), sep="\n  ")


if __name__ == "__main__":
    main()
