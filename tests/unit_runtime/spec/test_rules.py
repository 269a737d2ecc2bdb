"""The rules of the manifest: the loader answers as CEL does, and every row can be read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec.block import Block, Rule, inner_blocks
from orbit_runtime.spec.cel import compile_cel, fields_of, is_network
from orbit_runtime.spec.document import parse_document
from orbit_runtime.spec.run import COLLECTING, OrbitRun
from tests.cluster.corpus import EXAMPLES, hand_written
from tests.unit_runtime.spec.drawn_manifests import manifests


def kinds_of_blocks(kind: type[Block] = OrbitRun) -> Iterator[type[Block]]:
    yield kind
    for inner in inner_blocks(kind):
        yield from kinds_of_blocks(inner.kind)


def blocks_of(block: Block) -> Iterator[Block]:
    yield block
    for inner in inner_blocks(type(block)):
        value = getattr(block, inner.name)
        for each in value if inner.is_list else filter(None, [value]):
            yield from blocks_of(each)


ROWS = [(kind, rule) for kind in dict.fromkeys(kinds_of_blocks()) for rule in kind.rules if isinstance(rule, Rule)]


@cache
def oracle() -> Any:
    """CEL by its own makers. `isCIDR` is Kubernetes' addition; the API server answers for it in `tests/cluster`."""
    cel = pytest.importorskip("cel_expr_python.cel", reason="needs cel-expr-python, of the extra `dev`")
    from cel_expr_python.ext import ext_strings

    text = cel.Overload("is_cidr", return_type=cel.Type.BOOL, parameters=[cel.Type.STRING], impl=is_network)
    declared = cel.CelExtension("kubernetes", [cel.FunctionDecl("isCIDR", [text])])
    return cel.NewEnv(variables={"self": cel.Type.DYN}, extensions=[ext_strings.ExtStrings(), declared])


@cache
def by_oracle(cel: str) -> Any:
    return oracle().compile(cel)


def compare(run: OrbitRun) -> int:
    """Holds every rule of every block against both, and returns how many were broken."""
    broken = 0
    for block in blocks_of(run):
        value = block.model_dump(mode="json", by_alias=True, exclude_none=True)
        for rule in (each for each in block.rules if isinstance(each, Rule)):
            holds = by_oracle(rule.whole).eval(data={"self": value}).value()
            assert holds is (not list(rule(block))), (rule, value)
            broken += not holds
    return broken


def run_of(text: str) -> OrbitRun | None:
    """`None` where single fields are wrong, so that the API server asks no rule."""
    try:
        return OrbitRun.model_validate(parse_document(text, "x").value, by_name=False, context=COLLECTING)
    except (ManifestError, ValidationError):
        return None


def test_the_corpus_breaks_the_rules_that_it_breaks_in_cel() -> None:
    oracle()
    texts = [*(case.text for case in hand_written()), *(Path(path).read_text(encoding="utf-8") for path in EXAMPLES)]
    runs = [run for run in map(run_of, texts) if run]
    assert len(runs) >= 355
    assert sum(map(compare, runs)) > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifests())
def test_any_manifest_breaks_the_rules_that_it_breaks_in_cel(value: dict[str, Any]) -> None:
    oracle()
    compare(OrbitRun.model_validate(value, by_name=False, context=COLLECTING))


@pytest.mark.parametrize(("kind", "rule"), ROWS, ids=lambda each: getattr(each, "cel", ""))
def test_a_row_names_fields_that_its_block_has(kind: type[Block], rule: Rule) -> None:
    for path in (rule.field, *fields_of(rule.cel), *(rule.rests_on or ())):
        here: type[Block] | None = kind
        for part in path.split(".") if path else ():
            assert here is not None, path
            aliases = {field.alias for field in here.model_fields.values()}
            assert part in aliases, path
            here = next((inner.kind for inner in inner_blocks(here) if inner.alias == part), None)


@pytest.mark.parametrize(
    "text",
    [
        "true", "self.a + 1", "-self.a", "self.a[0]", "double(self.a)", "self.a.trim()",
        "self.a.matches(self.b)", "self.a == b", "self.l.all(x, x == 1)", "self.l.map(o, o)", "(self.a", "self.a)",
        "self.a ? 1", "self.a ||", "'a", "",
    ],
)  # fmt: skip
def test_a_form_that_no_rule_has_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(ValueError, match="form of CEL"):
        compile_cel(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 == 1 || 1 == 2 && 1 == 2", True),
        ("!(1 == 2) && 5 % 3 < 3", True),
        ("1 == 2 ? 1 == 1 : 2 == 1 ? 1 == 1 : 3 == 3", True),
        ("'a\\'b'.contains('\\'')", True),
        ("'a\\n'.matches('^a$')", False),
        ("'ä'.matches('\\\\w')", False),
        ("'Ab'.lowerAscii() == 'ab' && 'ab'.startsWith('a') && 'ab'.endsWith('b')", True),
        ("6e-05 < 0.5 && 'a' in ['b', 'a'] && size('äb') == 2", True),
        ("isCIDR('10.1.2.3/8') && !isCIDR('::ffff:1.2.3.4/100') && !isCIDR('10.0.0.0/33')", True),
    ],
)
def test_the_forms_say_what_they_say_in_cel(text: str, said: bool) -> None:
    assert compile_cel(text)({}) is said
    assert by_oracle(text).eval(data={"self": {}}).value() is said
