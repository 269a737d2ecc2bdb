"""The Roles hold exactly the verbs that the operator's code uses: none is missing, none too many."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from orbit_operator.observe import WORKLOADS

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator/orbit_operator"

VERBS = {
    "get": {"get"},
    "list": {"list"},
    "create": {"create"},
    # `orbit_operator.apply` looks at one that is there already: is it this run's?
    "_create": {"create", "get"},
    # Applying an object that is not there creates it, and the API server asks for both rights.
    "apply": {"create", "patch"},
    "merge": {"patch"},
    "replace": {"update"},
    "delete": {"delete"},
}
WATCHED = {"orbitruns", "jobs", "pods"}
"""What kopf lists and watches (`orbit_operator.handlers`)."""

IN_TURN = {("workloads", "list")}
"""What is asked for in one version after the other, by a name that stands for both (`orbit_operator.observe`)."""

VERB = "(?:get|list|watch|create|patch|update|delete)"

Rights = set[tuple[str, str]]


@cache
def plurals() -> dict[str, str]:
    """Names of the kinds in `orbit_operator.api`, and their plurals."""
    tree = ast.parse((OPERATOR / "api.py").read_text())
    return {
        node.targets[0].id: ast.literal_eval(node.value.args[1])
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value.func, ast.Name) and node.value.func.id == "Kind"
    }


def calls() -> Iterator[tuple[str, str, list[ast.expr]]]:
    """Method, name of the kind, all arguments: of every call of the API server whose kind is written out."""
    for file in sorted(OPERATOR.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            kind = node.args[0]
            if node.func.attr in VERBS and isinstance(kind, ast.Name) and kind.id in plurals():
                yield node.func.attr, kind.id, node.args


def used() -> Rights:
    found = IN_TURN | {(plural, verb) for plural in WATCHED for verb in ("list", "watch")}
    for method, kind, arguments in calls():
        resource, verbs = plurals()[kind], VERBS[method]
        last = arguments[-1]
        if isinstance(last, ast.Constant) and last.value == "status":
            resource, verbs = f"{resource}/status", {"patch"}
        found |= {(resource, verb) for verb in verbs}
    return found


def granted() -> Rights:
    """The rules of templates/_rules.tpl, everything switched on."""
    lines = (ROOT / "charts/orbit/templates/_rules.tpl").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("{{") and "resourceNames" not in line)
    rules: list[dict[str, Any]] = YAML(typ="safe").load(text)
    return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def test_what_is_asked_for_in_turn_is_one_kind_and_one_verb() -> None:
    assert {(kind.plural, "list") for kind in WORKLOADS} == IN_TURN
    tree = ast.parse((OPERATOR / "observe.py").read_text())
    (kueue,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Kueue")
    asked = {node.func.attr for node in ast.walk(kueue)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
             and isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "_api"}  # fmt: skip
    assert asked == {"list"}


def test_the_rights_are_the_ones_that_are_used() -> None:
    # `orbitruns/finalizers` is asked for by the API server itself, for owner references.
    needed = used() | {("orbitruns/finalizers", "update")}
    assert granted() - needed == set(), "more than is used"
    assert needed - granted() == set(), "less than is used"


def test_the_reading_of_the_code_finds_calls_of_every_kind_that_is_written() -> None:
    kinds = {(method, plurals()[kind]) for method, kind, _ in calls()}
    assert {
        ("_create", "jobs"),
        ("_create", "rayclusters"),
        ("apply", "configmaps"),
        ("replace", "leases"),
        ("delete", "pods"),
    } <= kinds
    assert not any("secrets" in plural for plural in plurals().values())


def test_the_security_guide_lists_the_same_rights() -> None:
    table = [
        line.split("|")[1:3]
        for line in (ROOT / "docs/guides/cluster/security.md").read_text().splitlines()
        if re.match(rf"\| .* \| {VERB}(, {VERB})* \| ", line)
    ]
    names = {
        "its own Lease": ["leases"],
        "the Lease `orbit-runs` of a watched namespace": ["leases"],
        "nodes": ["nodes"],
        "`workloads` (Kueue)": ["workloads"],
        "`rayclusters` (KubeRay)": ["rayclusters"],
    }
    listed = {
        (resource.strip("` "), verb)
        for left, right in table
        for resource in names.get(left.strip(), left.strip().split(", "))
        for verb in right.strip().split(", ")
    }
    assert listed == granted()
