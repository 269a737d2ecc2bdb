"""Other libraries' code on our bytes differs where the page of the formats says so, by as much, and nowhere else.

Libraries that the tests do not install are measured by `make vendor-table`; their rows are skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata

import pytest

from orbit_runtime.quant.formats import FORMATS
from tools.formats.measure import FILE
from tools.formats.page import LAYOUTS
from tools.formats.vendors import IMPORTS, ORACLE, ROWS, Row, measure

FIGURES = json.loads(FILE.read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_library_reads_as_the_page_says(row: Row) -> None:
    recorded = FIGURES[row.name]
    assert recorded["why"] == row.why
    module = IMPORTS.get(row.library)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{row.library} is not installed: `make vendor-table` measures it")
    if row.library and metadata.version(row.library) != recorded["version"]:
        pytest.skip(f"{row.library} {recorded['version']} was measured: `make vendor-table` measures another")
    found = measure(row)
    assert (found.differing == 0) == (recorded["differing"] == 0)
    assert found.differing == pytest.approx(recorded["differing"], rel=0.05)
    assert found.signs_of_zero == pytest.approx(recorded["signs_of_zero"], rel=0.05)
    assert found.largest <= 2**-7, "a rounding, never another value"


def test_every_layout_has_one_oracle_whose_bits_are_ours() -> None:
    oracles = [row.layout for row in ROWS if row.why == ORACLE]
    assert sorted(oracles) == sorted(set(FORMATS) - {"BF16"})
    assert {name: FIGURES[name]["differing"] for name in FIGURES if FIGURES[name]["why"] == ORACLE} == dict.fromkeys(
        (row.name for row in ROWS if row.why == ORACLE), 0
    )


def test_the_page_speaks_of_every_layout_and_every_row() -> None:
    assert set(LAYOUTS) == set(FORMATS)
    assert list(FIGURES) == [row.name for row in ROWS]
