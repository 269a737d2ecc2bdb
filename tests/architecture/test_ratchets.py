"""What the code is made of does not grow: each number of `ratchets` stays at its ceiling or below."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest

from tests.architecture import ratchets
from tests.architecture.ratchets import Ceiling

GROWN = "a ceiling rises only in a commit that names the feature and what was deleted for it"


def check(numbers: Mapping[str, int]) -> None:
    print(ratchets.table(numbers))
    above = ratchets.above(numbers)
    assert not above, "\n".join([*above, GROWN])


def test_the_sources_have_not_grown() -> None:
    check(ratchets.counted())


@pytest.mark.timeout(600)
def test_a_step_of_the_quickstart_takes_no_longer_way() -> None:
    check(ratchets.traced())


def test_statements_are_counted_without_docstrings() -> None:
    text = '"""Module."""\nx: int = 1\n"""Of a field."""\ndef f():\n    """F."""\n    if x: return 2; 3\n'
    assert ratchets.num_statements(ast.parse(text)) == 5
    assert ratchets.num_functions(ast.parse(text + "class A:\n    async def g(self): pass\n")) == 2


def test_an_import_is_of_the_module_that_it_names() -> None:
    modules = {
        "p.__init__": ast.parse("from p.a import x"),
        "p.a": ast.parse("def f():\n    from p import b"),
        "p.b": ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a"),
        "p.c": ast.parse("from p import x"),
    }
    edges = ratchets.imports(modules)
    assert edges == {"p.__init__": {"p.a"}, "p.a": {"p.b"}, "p.b": {"p.a"}, "p.c": {"p.__init__"}}
    assert ratchets.cycles(edges) == [{"p.a", "p.b"}]


def test_a_fragment_is_short_and_has_one_importer_beside_it() -> None:
    edges: dict[str, set[str]] = {
        "orbit_runtime.a.one": {"orbit_runtime.a.short", "orbit_runtime.a.long", "orbit_runtime.a.shared"},
        "orbit_runtime.a.two": {"orbit_runtime.a.shared", "orbit_runtime.a.listed"},
        "orbit_runtime.b.one": {"orbit_runtime.a.far"},
        **{f"orbit_runtime.a.{name}": set() for name in ("short", "long", "shared", "far", "listed")},
    }
    lines = dict.fromkeys(edges, 99) | {"orbit_runtime.a.long": 100}
    assert ratchets.fragments(edges, lines, ("orbit_runtime.a.listed",)) == ["orbit_runtime.a.short"]


def test_a_class_name_is_counted_once_however_often_it_is_used() -> None:
    modules = {
        "a": ast.parse("class Turn: pass\nclass _Own: pass\nclass A: pass"),
        "b": ast.parse("class Turn: pass\nclass _Own: pass"),
        "c": ast.parse("class Turn: pass"),
    }
    assert ratchets.repeated_classes(modules) == {"Turn": ["a", "b", "c"]}


def test_a_number_above_its_ceiling_or_without_one_is_named() -> None:
    ceilings = {"files": Ceiling(2), "functions": Ceiling(5)}
    assert ratchets.above({"files": 2, "functions": 4}, ceilings) == []
    assert ratchets.above({"files": 3, "new": 1}, ceilings) == [
        "files: 3, and its ceiling is 2",
        "new: 1, and its ceiling is missing",
    ]
