"""What each folder says about itself, what it may import from outside, and which environment variables it reads."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture import ratchets

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "orbit_runtime"

WITHOUT_TORCH = {"errors", "digests", "types", "seeds", "spec", "ports", "workers", "storage", "model_info", "planner"}
"""These run in the light install: in the operator, in `orbit validate`, in the pod before anything heavy is loaded."""
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "peft",
    "triton",
    "datasets",
    "pandas",
}

IMPORT_NAMES = {
    "ruamel.yaml": "ruamel", "math-verify": "math_verify", "prometheus-client": "prometheus_client",
    "megatron-core": "megatron", "mlflow-skinny": "mlflow",
}  # fmt: skip
"""Distributions whose module has another name."""
INDIRECT = {
    "jinja2": "renders chat templates, inside transformers",
    "tokenizers": "pinned with transformers",
    "httptools": "parses HTTP, inside uvicorn",
}
"""Declared dependencies that no module of ours imports by name, and why they are declared all the same."""
UNDECLARED = {
    "pydantic_core": "comes with pydantic, same release",
    "starlette": "comes with fastapi",
    "yarl": "comes with aiohttp, whose addresses it makes",
}
"""Modules that arrive with a declared dependency and are part of its interface."""

CLOCKLESS = {
    "algorithms", "adapters", "data", "environments", "loop", "parity", "policy", "quant", "rollout", "sglang_plugin",
    "sides", "training", "workers",
}  # fmt: skip
"""Packages in which nothing is decided by the time of day. `storage`, whose fence has to survive a skewed clock, is
tested with one."""
TIMES_TOLD = 3
"""Places where the loop tells people the time: when a run began (`run.json`), and of a step and an evaluation
(`status`).
"""


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """Top-level package or module of orbit_runtime, and its syntax tree, file by file."""
    found = []
    for path in sorted(RUNTIME.rglob("*.py")):
        parts = path.relative_to(RUNTIME).parts
        found.append((parts[0].removesuffix(".py"), ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))
    return found


def outside_imports(tree: ast.Module) -> set[str]:
    """Top-level names that `tree` imports, at any depth, without ours and the standard library's."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return {name for name in names if name not in sys.stdlib_module_names and name != "orbit_runtime"}


def declared() -> dict[str, set[str]]:
    """Distributions that pyproject.toml declares, by extra; the base install is ``""``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {canonicalize_name(Requirement(line).name) for line in lines} for extra, lines in groups.items()}


def import_name(distribution: str) -> str:
    names = {canonicalize_name(key): value for key, value in IMPORT_NAMES.items()}
    return names.get(distribution, distribution.replace("-", "_"))


def test_every_folder_says_in_its_docstring_what_belongs_there() -> None:
    silent = []
    for folder in sorted({path.parent for path in RUNTIME.rglob("*.py")}):
        init = folder / "__init__.py"
        docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) if init.exists() else None
        if not docstring:
            silent.append(init.relative_to(ROOT).as_posix())
    assert not silent, f"without a docstring, or missing: {silent}"


def test_every_module_has_a_docstring() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in sorted(RUNTIME.rglob("*.py"))
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, f"without a docstring: {silent}"


def test_nothing_from_the_planner_down_imports_torch_or_what_comes_with_it() -> None:
    found = {(package, name) for package, tree in modules() for name in outside_imports(tree) & HEAVY}
    wrong = sorted((package, name) for package, name in found if package in WITHOUT_TORCH)
    assert not wrong, f"(package, import): {wrong}"


def test_types_and_seeds_and_errors_need_the_standard_library_only() -> None:
    for package, tree in modules():
        if package in ("types", "seeds", "digests", "errors"):
            assert not outside_imports(tree), package


def test_every_outside_import_is_declared() -> None:
    groups = declared()
    product = {import_name(name) for extra, names in groups.items() if extra != "dev" for name in names}
    used = {name for _, tree in modules() for name in outside_imports(tree)}
    missing = sorted(used - product - set(UNDECLARED))
    assert not missing, f"imported by orbit_runtime, and in no extra that users install: {missing}"


def test_every_declared_dependency_is_used() -> None:
    groups = declared()
    used = {name for _, tree in modules() for name in outside_imports(tree)}
    idle = sorted(
        name for name in groups[""] | groups["train"] if import_name(name) not in used and name not in INDIRECT
    )
    assert not idle, f"declared for users, and imported by nothing: {idle}"


def test_the_base_install_has_nothing_heavy() -> None:
    heavy = {canonicalize_name(name) for name in HEAVY}
    assert not declared()[""] & heavy


def environment_reads(tree: ast.Module) -> set[str]:
    """Names of environment variables that `tree` reads by a literal, and `?` for one that it reads by another way."""
    names = set()
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            key = node.slice
        elif isinstance(node, ast.Call) and re.search(
            r"(environ\.(get|pop|setdefault)|getenv)$", ast.unparse(node.func)
        ):
            key = node.args[0]
        if key is not None:
            names.add(key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "?")
    return names


def test_what_asks_servers_reads_no_clock_that_somebody_may_set() -> None:
    """Deadlines and patience are of a monotonic clock, and no server's time is believed: skew costs nothing. So does a
    clock that jumps in the middle of a run: neither the loop nor what it asks looks at it, but for what is told."""
    readers = []
    for package, tree in modules():
        if package not in CLOCKLESS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "time.localtime"):
                readers.append(f"{package}: line {node.lineno}")
            # A length of time is no clock.
            imported = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
            if "datetime" in imported and imported != "from datetime import timedelta":
                readers.append(f"{package}: line {node.lineno}")
    assert [each for each in readers if not each.startswith("loop: ")] == []
    told = [each for each in readers if each.startswith("loop: ")]
    assert len(told) == TIMES_TOLD, f"if what was added decides nothing, count it: {told}"


def test_every_environment_variable_that_is_read_is_documented() -> None:
    read = {name for _, tree in modules() for name in environment_reads(tree)} - {"?"}
    page = ROOT / "docs" / "reference" / "environment.md"
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page.read_text(encoding="utf-8"))) if page.exists() else set()
    missing = sorted(read - documented)
    assert not missing, f"read by orbit_runtime, and not in {page.relative_to(ROOT)}: {missing}"


def test_the_search_for_environment_variables_finds_each_form() -> None:
    source = "import os\nos.environ['A']\nos.environ.get('B', '')\nos.getenv('C')\nenviron.pop('D')\nos.environ[name]"
    assert environment_reads(ast.parse(source)) == {"A", "B", "C", "D", "?"}


def defaults_from_the_environment(tree: ast.Module) -> list[str]:
    """Functions with a parameter whose default is made from the environment: `help()` would print every secret."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for default in (*node.args.defaults, *node.args.kw_defaults)
        if default is not None and re.search(r"\b(environ|getenv)\b", ast.unparse(default))
    ]


def test_no_parameters_default_is_the_environment() -> None:
    assert [name for _, tree in modules() for name in defaults_from_the_environment(tree)] == []


def test_the_search_for_such_defaults_finds_each_form() -> None:
    source = (
        "def a(x=os.environ): ...\ndef b(*, x=dict(environ)): ...\nasync def c(x=os.getenv('K')): ...\ndef d(x=1): ..."
    )
    assert defaults_from_the_environment(ast.parse(source)) == ["a", "b", "c"]


def unknown_extras(requirement: Requirement, provided: list[str]) -> set[str]:
    """Extras that the distribution does not list in this very spelling: some installers compare no other way."""
    return requirement.extras - set(provided)


def test_every_extra_that_a_requirement_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    unknown = []
    for line in [
        *project["dependencies"],
        *(each for group in project["optional-dependencies"].values() for each in group),
    ]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == "orbit-rl":
            provided = list(project["optional-dependencies"])
        else:
            try:
                provided = distribution(requirement.name).metadata.get_all("Provides-Extra") or []
            except PackageNotFoundError:
                continue
        unknown += [f"{line}: {extra}" for extra in unknown_extras(requirement, provided)]
    assert unknown == []


def test_an_extra_in_another_spelling_counts_as_unknown() -> None:
    assert unknown_extras(Requirement("math-verify[antlr4_13_2]"), ["antlr4-13-2"]) == {"antlr4_13_2"}


def test_every_package_that_is_shipped_says_that_it_is_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "Typing :: Typed" in project["project"]["classifiers"]
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert (ROOT / package / "py.typed").is_file(), package


USER_CODE = "orbit_runtime.workers.user_code."
FOREIGN_PROCESSES = {
    "SGLang's": [name for name in ratchets.product() if name.startswith("orbit_runtime.sglang_plugin")],
    "user code's": [f"{USER_CODE}{name}" for name in ("environment_template", "reward_worker", "sandbox_child")],
}
"""Modules that run in processes which are not Orbit's own."""


@pytest.mark.parametrize("whose", FOREIGN_PROCESSES)
def test_a_process_that_is_not_orbits_own_imports_no_manifest(whose: str) -> None:
    at_import = {
        name: ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        for name, tree in ratchets.product().items()
    }
    edges, found, todo = ratchets.imports(at_import), set[str](), [*FOREIGN_PROCESSES[whose]]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            parents = [name.rsplit(".", depth)[0] + ".__init__" for depth in range(1, name.count(".") + 1)]
            todo += [*edges[name], *(parent for parent in parents if parent in edges)]
    assert not [name for name in found if name.startswith("orbit_runtime.spec.")]
